"""Writes docs/reference/costs-by-model.md: what K, QKV and other encodings add to usual models.

    python tools/make_cost_table.py

Parameters and multiply-accumulates are counted by `irpe.profile` on tensors without memory: nothing
is downloaded, nothing is timed.
"""

from pathlib import Path

from irpe.errors import UserError
from irpe.profile.cost import count
from irpe.profile.models import input_size

PAGE = Path(__file__).parents[1] / "docs/reference/costs-by-model.md"
ENCODINGS = ("product-bias-k", "product-contextual-k", "product-contextual-qkv", "rope-axial")
MODELS = (
    "vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224",
    "vit_large_patch16_224",
    "vit_base_patch32_224", "vit_base_patch16_384", "deit_tiny_patch16_224",
    "deit_small_patch16_224", "deit_base_patch16_224", "deit3_small_patch16_224",
    "deit3_base_patch16_224", "vit_small_patch14_dinov2", "vit_base_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3", "vit_base_patch16_dinov3",
    "eva02_tiny_patch14_224", "eva02_small_patch14_224", "eva02_base_patch14_224",
    "beit_base_patch16_224", "beitv2_base_patch16_224", "vit_base_patch16_siglip_224",
    "vit_so400m_patch14_siglip_224", "vit_base_patch16_clip_224", "vit_large_patch14_clip_224",
    "samvit_base_patch16", "vit_base_patch16_rope_224", "vit_relpos_base_patch16_224",
    "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224",
    "swin_base_patch4_window7_224", "swinv2_tiny_window8_256", "maxvit_tiny_tf_224",
    "coatnet_0_rw_224", "pvt_v2_b0", "pvt_v2_b2", "twins_pcpvt_small", "twins_svt_small",
    "mvitv2_tiny", "mvitv2_small", "cait_s24_224", "xcit_small_12_p16_224", "volo_d1_224",
    "tiny_vit_5m_224", "davit_tiny", "visformer_small",
)  # fmt: skip


def main() -> None:
    """Counts all models and writes the page."""
    lines: list[str] = []
    for model in MODELS:
        try:
            plain = count(model, "none")
        except UserError as error:
            print(f"{model}: {error}")
            continue
        cells = [f"{plain.parameters / 1e6:.1f}", f"{plain.macs / 1e6:,.0f}"]
        for encoding in ENCODINGS:
            try:
                cells.append(f"{100 * (count(model, encoding).macs / plain.macs - 1):+.1f}")
            except UserError as error:
                print(f"{model}, {encoding}: {error}")
                cells.append("-")
        if any(cell != "-" for cell in cells[2:]):
            lines.append(f"| `{model}` | {input_size(model)[2]} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    head = PAGE.read_text().split("| model |")[0] if PAGE.exists() else "# Costs by model\n\n"
    names = " | ".join(f"`{name}` (%)" for name in ENCODINGS)
    table = f"| model | pixels | parameters (M) | MACs (M) | {names} |\n"
    table += "| --- |" + " --- |" * (3 + len(ENCODINGS)) + "\n"
    PAGE.write_text(head + table + "\n".join(lines) + "\n")


main()
