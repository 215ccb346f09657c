"""Named models. Importing this registers the names of the paper's authors with timm."""

import importlib

from irpe.extras import require

require("timm", "timm")
importlib.import_module("irpe.models.deit")
