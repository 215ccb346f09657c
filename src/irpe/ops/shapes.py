"""The shapes of attention with encodings."""

from jaxtyping import Bool, Float, Integer
from torch import Tensor

Tokens = Float[Tensor, "batch heads tokens dim"]
Keys = Float[Tensor, "batch heads keys dim"]
Scores = Float[Tensor, "batch heads query key"]  # one element for each head and pair of tokens
Ids = Integer[Tensor, "*batch query key"]
VectorTable = Float[Tensor, "heads_or_1 rows dim"]
ScalarTable = Float[Tensor, "heads_or_1 rows"]
Mask = Bool[Tensor, "..."] | Float[Tensor, "..."]
