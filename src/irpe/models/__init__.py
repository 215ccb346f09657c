"""Named models. Importing this tells timm the names that the paper's authors gave theirs."""

import importlib

from irpe.extras import require

require("timm", "timm")
importlib.import_module("irpe.models.deit")
