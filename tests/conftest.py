"""Shapes in signatures are checked at run time in the tests, and only there.

The modules below work on arguments that the public functions have checked already; those speak for
themselves when something is wrong.
"""

from jaxtyping import install_import_hook

install_import_hook(
    [
        "irpe.core.methods",
        "irpe.ops.blockwise",
        "irpe.ops.impl",
        "irpe.ops.lookup",
        "irpe.ops.masking",
        "irpe.ops.terms",
    ],
    "beartype.beartype",
)
