"""The published place of `histocc.model.model_io`."""

from histocc.model.model_io import *  # noqa: F403
