"""The extra MACs of an encoding as the image grows, direct against efficient (the paper's Fig. 4).

The direct form multiplies the row of every pair (Eq. 26 and 17); the efficient form is what the
library runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding
from irpe.profile.cost import count
from irpe.profile.count import count_macs
from irpe.profile.formulas import Call, recorded_calls
from irpe.profile.models import create, input_size
from irpe.progress import Listener, silent, tracked


@dataclass(frozen=True)
class ExtraMacs:
    """What an encoding adds at one resolution, for one image.

    Args:
        model: The name of the model.
        encoding: The text of the encoding.
        resolution: The height and width of the image.
        tokens: The tokens of the first attention, prefix tokens included.
        plain: The MACs of the model without an encoding.
        direct: What the encoding adds if the row of every pair is multiplied.
        efficient: What it adds in the form that the library runs.
    """

    model: str
    encoding: str
    resolution: int
    tokens: int
    plain: int
    direct: int
    efficient: int


def extra_macs_by_resolution(
    model: str,
    encoding: str,
    resolutions: Sequence[int],
    listen: Listener = silent,
) -> list[ExtraMacs]:
    """Returns the extra MACs of both forms at each resolution, counted and not computed.

    Args:
        model: The name of the model in timm or transformers.
        encoding: The text of an encoding of attentions.
        resolutions: Heights and widths of square images.
        listen: Is called with how far it is.
    """
    rows: list[ExtraMacs] = []
    for resolution in tracked(listen, resolutions, len(resolutions), "counting"):
        plain = count(model, "none", resolution).macs
        encoded = count(model, encoding, resolution).macs
        calls = _calls(model, encoding, resolution)
        if not calls:
            raise UserError(
                f"encoding {encoding!r} has no direct form to compare with: it is not an "
                "encoding of attentions; use for example product-contextual-k"
            )
        rows.append(
            ExtraMacs(
                model=model,
                encoding=encoding,
                resolution=resolution,
                tokens=calls[0].shape[2],
                plain=plain,
                direct=sum(map(direct_macs, calls)),
                efficient=encoded - plain,
            )
        )
    return rows


def direct_macs(call: Call) -> int:
    """Returns what the direct form of an encoding adds to plain attention, counted."""
    q = torch.empty(call.shape, device="meta")
    macs = count_macs(_Direct(call), q)
    return macs - 2 * q.numel() * call.num_keys


class _Direct(torch.nn.Module):
    """Attention with an encoding in the direct form."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.encoding, self.grid, self.num_keys = call.module, call.grid, call.num_keys

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        k = q.new_empty(*q.shape[:2], self.num_keys, q.shape[3])
        return self.encoding(q, k, k, grid=self.grid, impl="reference")


def _calls(model: str, encoding: str, resolution: int) -> list[Call]:
    made = create(model, encoding, resolution, "meta")
    images = torch.empty(1, input_size(model)[0], resolution, resolution, device="meta")
    with recorded_calls(made) as calls, torch.no_grad():
        made(images)
    return [call for call in calls if isinstance(call.module, RelativePositionEncoding)]
