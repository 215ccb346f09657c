"""timm's attentions that are given a map or windows of one: MaxViT, CoAtNet, VOLO, Twins, ..."""

from functools import partial
from typing import Any

import torch.nn.functional as F  # noqa: N812
from timm.models import davit, fastvit, gcvit, maxxvit, tiny_vit, twins, visformer, volo
from torch import Tensor, nn

from irpe.adapters.changes import drop_module, drop_parameter, put_absolute
from irpe.adapters.grids import GridSource
from irpe.adapters.hosts.timm.attending import (
    attend,
    head_dim_of,
    map_grid,
    project_out,
    split_heads,
)
from irpe.adapters.plan import Plan, Request, Site, check_window


class RPEAttention2d(maxxvit.Attention2d):
    """CoAtNet's attention with an encoding; `x` is batch channels rows columns."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Returns the attended map."""
        qkv = self.qkv(x).flatten(2).transpose(1, 2)
        return _attend_map(self, x, _split(self, qkv), _own_bias(self, shared_rel_pos))


class RPEAttentionCl(maxxvit.AttentionCl):
    """MaxViT's attention in windows with an encoding; `x` is windows rows columns channels."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Returns the attended windows."""
        grid = map_grid(self, x.shape[1:3])
        qkv = _split(self, self.qkv(x).flatten(1, 2))
        z = attend(self, *qkv, grid, _own_bias(self, shared_rel_pos))
        return project_out(self, z.unflatten(1, grid))


class RPEVisformerAttention(visformer.Attention):
    """Visformer's attention with an encoding; `x` is batch channels rows columns."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended map."""
        qkv = self.qkv(x).flatten(2).transpose(1, 2)
        return _attend_map(self, x, split_heads(qkv, self.num_heads))


class RPEFastViTAttention(fastvit.Attention):
    """FastViT's attention with an encoding; `x` is batch channels rows columns."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended map."""
        grid = map_grid(self, x.shape[2:])
        q, k, v = split_heads(self.qkv(x.flatten(2).transpose(1, 2)), self.num_heads)
        z = project_out(self, attend(self, q, k, v, grid))
        return z.transpose(1, 2).unflatten(2, grid)


class RPEVOLOAttention(volo.Attention):
    """VOLO's self-attention with an encoding; `x` is batch rows columns channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended map."""
        grid = map_grid(self, x.shape[1:3])
        q, k, v = split_heads(self.qkv(x.flatten(1, 2)), self.num_heads)
        return project_out(self, attend(self, q, k, v, grid).unflatten(1, grid))


class RPELocallyGroupedAttn(twins.LocallyGroupedAttn):
    """Twins' attention in windows with an encoding."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the attended tokens; `size` is the grid of all of them."""
        return _attend_in_windows(self, x, size)


class RPEDaViTAttention(davit.WindowAttention):
    """DaViT's attention in windows with an encoding; `x` is windows tokens channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended windows."""
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        return self.proj(attend(self, q, k, v, self.window_size))


class RPETinyViTAttention(tiny_vit.Attention):
    """TinyViT's attention in windows with an encoding; `x` is windows tokens channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attended windows."""
        parts = self.qkv(self.norm(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = parts.split([self.key_dim, self.key_dim, self.val_dim], dim=3)
        has_bias = self._parameters["attention_biases"] is not None
        mask = self.get_attention_biases(x.device) if has_bias else None
        return self.proj(attend(self, q, k, v, self.resolution, mask))


class RPEGlobalContextAttention(gcvit.WindowAttentionGlobal):
    """GCViT's attention in windows with an encoding, also with queries of the whole image."""

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        """Returns the attended windows."""
        if not self.use_global or q_global is None:
            q, k, v = split_heads(self.qkv(x), self.num_heads)
        else:
            heads = (self.num_heads, -1)
            k, v = self.qkv(x).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4).unbind(0)
            q = q_global.repeat_interleave(x.shape[0] // q_global.shape[0], dim=0)
            q = q.reshape(*x.shape[:2], *heads).transpose(1, 2)
        mask = _own_bias(self)
        return project_out(self, attend(self, q, k, v, self.window_size, mask))


def _split(attention: Any, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values: their channels are ordered by head, or by role, first."""
    if not attention.head_first:
        return split_heads(qkv, attention.num_heads)
    by_head = qkv.unflatten(-1, (attention.num_heads, 3, -1))  # batch tokens heads 3 dim
    q, k, v = by_head.permute(3, 0, 2, 1, 4).unbind(0)
    return q, k, v


def _own_bias(attention: Any, shared: Tensor | None = None) -> Tensor | None:
    return shared if attention.rel_pos is None else attention.rel_pos.get_bias()


def _attend_map(
    attention: Any, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None = None
) -> Tensor:
    """Returns an attended map, batch channels rows columns, after a projection of maps."""
    grid = map_grid(attention, x.shape[2:])
    return project_out(
        attention, attend(attention, *qkv, grid, mask).transpose(1, 2).unflatten(2, grid)
    )


def _attend_in_windows(attention: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the attended tokens of a grid, padded to whole windows."""
    (rows, columns), window = size, (attention.ws, attention.ws)
    padded = F.pad(x.unflatten(1, size), (0, 0, 0, -columns % window[1], 0, -rows % window[0]))
    windows = gcvit.window_partition(padded, window).flatten(1, 2)
    q, k, v = split_heads(attention.qkv(windows), attention.num_heads)
    z = attend(attention, q, k, v, window).unflatten(1, window)
    z = gcvit.window_reverse(z, window, (padded.shape[1], padded.shape[2]))
    return project_out(attention, z[:, :rows, :columns].flatten(1, 2))


_EQUIPPED: dict[type[nn.Module], type[nn.Module]] = {
    maxxvit.Attention2d: RPEAttention2d,
    maxxvit.AttentionCl: RPEAttentionCl,
    visformer.Attention: RPEVisformerAttention,
    fastvit.Attention: RPEFastViTAttention,
    volo.Attention: RPEVOLOAttention,
    twins.LocallyGroupedAttn: RPELocallyGroupedAttn,
    davit.WindowAttention: RPEDaViTAttention,
    tiny_vit.Attention: RPETinyViTAttention,
    gcvit.WindowAttentionGlobal: RPEGlobalContextAttention,
}


def add_sites(found: Plan, name: str, module: nn.Module, request: Request) -> None:
    """Adds an attention that is given a map, and what replaces an absolute encoding of VOLO."""
    if isinstance(module, volo.VOLO) and request.absolute != "keep":
        grid = () if module.pos_embed is None else module.pos_embed.shape[1:3]
        found.changes.append(partial(put_absolute, module, "pos_embed", grid, request.absolute))
    equipped = next((new for old, new in _EQUIPPED.items() if isinstance(module, old)), None)
    if equipped is not None:
        found.sites.append(_site_of(name, module, equipped, request))


def _site_of(name: str, module: Any, equipped: type[nn.Module], request: Request) -> Site:
    is_tiny, is_volo = isinstance(module, tiny_vit.Attention), isinstance(module, volo.Attention)
    has_bias = is_tiny or getattr(module, "rel_pos", None) is not None
    drop = [partial(drop_module, module, "rel_pos")]
    if is_tiny:
        drop = [partial(drop_parameter, module, "attention_biases")]
    return Site(
        name=name,
        attention=module,
        equipped_class=equipped,
        num_heads=module.num_heads,
        head_dim=head_dim_of(module),
        num_prefix_tokens=0,
        grid=GridSource(_window_of(module)),
        changes=drop if has_bias and request.builtin_bias == "drop" else [],
        check=partial(check_window, request, has_absolute=is_volo, kind="this model"),
        has_builtin_bias=has_bias,
    )


def _window_of(attention: Any) -> tuple[int, int] | None:
    """Returns the size of the windows of an attention; `None` where it is given a map."""
    if hasattr(attention, "ws"):  # Twins
        return attention.ws, attention.ws
    names = ("window_size", "resolution")
    return next((getattr(attention, name) for name in names if hasattr(attention, name)), None)
