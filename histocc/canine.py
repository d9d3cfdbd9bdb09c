"""The published place of `histocc.model.canine`."""

from histocc.model.canine import *  # noqa: F403
