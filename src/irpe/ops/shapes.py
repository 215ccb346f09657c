"""The shapes that attention with encodings deals in."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens = Float[Tensor, "batch heads tokens dim"]
Pairs = Float[Tensor, "batch heads query key"]
Ids = Int[Tensor, "query key"]
VectorTable = Float[Tensor, "heads_or_1 rows dim"]
ScalarTable = Float[Tensor, "heads_or_1 rows"]
Mask = Bool[Tensor, "..."] | Float[Tensor, "..."]
