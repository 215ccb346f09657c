"""Shapes in signatures are checked at run time in the tests, and only there.

The modules below work on arguments that the public functions have checked already; those speak for
themselves when something is wrong. The compiler does not trace through the checks, so the module
that it traces, `irpe.ops.impl.fused`, goes without.
"""

from jaxtyping import install_import_hook

install_import_hook(
    [
        "irpe.core.methods",
        "irpe.ops.blockwise",
        "irpe.ops.impl.efficient",
        "irpe.ops.impl.reference",
        "irpe.ops.lookup",
        "irpe.ops.masking",
        "irpe.ops.terms",
    ],
    "beartype.beartype",
)
