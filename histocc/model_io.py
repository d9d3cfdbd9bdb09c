"""The published place of `histocc.published.models`."""

from histocc.published.models import *  # noqa: F403
