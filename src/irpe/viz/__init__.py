"""Figures of the paper, drawn from the library's own objects, and the explorer page.

Each function returns a matplotlib figure, which `save_figure` writes as PNG or SVG. The command
`irpe show` does the same from the command line. Needs the extra `viz`.
"""

from irpe.viz.attention_maps import plot_attention, plot_weights
from irpe.viz.bucket_maps import plot_buckets
from irpe.viz.canvas import save_figure
from irpe.viz.capture import CapturedAttention, capture
from irpe.viz.conversions import plot_conversion, plot_position_probe
from irpe.viz.costs import plot_cost_bars, plot_cost_curves, plot_gpu_times
from irpe.viz.explorer import explorer_page
from irpe.viz.images import default_image, image_input, plot_images, read_image
from irpe.viz.index_curves import plot_index
from irpe.viz.locality import Locality, measure_locality, plot_locality
from irpe.viz.position_maps import plot_positions
from irpe.viz.scores import plot_robustness, plot_scores, plot_training
from irpe.viz.table_maps import plot_tables
from irpe.viz.wandering_star import animate_star, save_animation

__all__ = [
    "CapturedAttention",
    "Locality",
    "animate_star",
    "capture",
    "default_image",
    "explorer_page",
    "image_input",
    "measure_locality",
    "plot_attention",
    "plot_buckets",
    "plot_conversion",
    "plot_cost_bars",
    "plot_cost_curves",
    "plot_gpu_times",
    "plot_images",
    "plot_index",
    "plot_locality",
    "plot_position_probe",
    "plot_positions",
    "plot_robustness",
    "plot_scores",
    "plot_tables",
    "plot_training",
    "plot_weights",
    "read_image",
    "save_animation",
    "save_figure",
]
