"""What `make_relative` returns: what is lost, as a table, a figure, JSON and a sentence."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Agreement:
    """How well tokens, or outputs, agree with those of the original model.

    Args:
        r2: 1 less the squared error relative to the variance of each feature; of a single vector,
            which has no variance, relative to its square.
        cosine: The mean cosine.
    """

    r2: float
    cosine: float

    @classmethod
    def of(cls, originals: Sequence[Tensor], others: Sequence[Tensor]) -> "Agreement":
        """Returns the agreement of batches of vectors, which may differ in the number of tokens."""
        first = torch.cat([each.detach().flatten(0, -2).double() for each in originals])
        other = torch.cat([each.detach().flatten(0, -2).double() for each in others])
        centre = first.mean(0) if len(first) > 1 else torch.zeros_like(first[0])
        error, variance = (first - other).square().sum(), (first - centre).square().sum()
        cosine = torch.nn.functional.cosine_similarity(first, other).mean()
        return cls(float(1 - error / variance.clamp(min=1e-300)), float(cosine))


@dataclass(frozen=True)
class SolvedAttention:
    """One attention after its tables were solved for; everything is measured on held-out images.

    Args:
        name: Its path in the model.
        divergence_before: The mean divergence of attention rows from the original's, in nats, with
            zero tables here and solved ones in the attentions before.
        divergence_after: The same with its tables.
        explained: How much of the missing scores the tables explain, weighted as in the solution.
        tokens: How well the tokens that enter it agree with the original's.
        largest_element: The largest absolute value in its tables.
        ridges: The penalty that held-out images chose, for each group of tables; infinite where
            none helped.
    """

    name: str
    divergence_before: float
    divergence_after: float
    explained: float
    tokens: Agreement
    largest_element: float
    ridges: tuple[float, ...]


@dataclass(frozen=True)
class Conversion:
    """What a model that was made relative has lost, on held-out images.

    Args:
        spec: The encoding.
        num_images: How many images were used in all.
        num_held_out: How many of these chose penalties and were measured on.
        attentions: Each attention, from the input on.
        before: How well the output agrees with the original's when its absolute encoding is taken
            out and nothing put in its place.
        after: The same with the solved tables.
        accuracy: That of the original, without positions, and with the tables, if labels were
            given.
    """

    spec: str
    num_images: int
    num_held_out: int
    attentions: tuple[SolvedAttention, ...]
    before: Agreement
    after: Agreement
    accuracy: tuple[float, float, float] | None = None

    def table(self) -> str:
        """Returns what is lost at each attention, as text."""
        width = max(len(each.name) for each in self.attentions)
        lines = [
            f"{'attention':{width}}  divergence: before   after  explained  tokens: R2  largest"
        ]
        lines += [
            f"{each.name:{width}}  {each.divergence_before:18.4f}  {each.divergence_after:6.4f}"
            f"  {each.explained:9.1%}  {each.tokens.r2:10.3f}  {each.largest_element:7.2f}"
            for each in self.attentions
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.sentence()}"

    def sentence(self) -> str:
        """Returns what the model is good for now."""
        agreement = (
            f"Outputs on {self.num_held_out} held-out images: cosine {self.after.cosine:.3f} to "
            f"the original ({self.before.cosine:.3f} without tables), R2 {self.after.r2:.2f} "
            f"({self.before.r2:.2f})."
        )
        if self.accuracy is not None:
            original, without, solved = self.accuracy
            agreement += (
                f" Accuracy: {original:.1%} before, {without:.1%} without tables, {solved:.1%} now."
            )
        return f"{agreement} {self._advice()}"

    def _advice(self) -> str:
        if self.after.cosine >= 0.95 and self.after.r2 >= 0.8:
            return "The model can be used as it is; fine-tune it where the last points count."
        if self.after.cosine > self.before.cosine:
            return "The model is a start for fine-tuning or distillation, not a replacement."
        return "The tables do not bring back what was lost: keep the absolute encoding."

    def to_json(self) -> str:
        """Returns everything as JSON."""
        return json.dumps({**asdict(self), "sentence": self.sentence()}, indent=2)

    def figure(self) -> "Figure":
        """Returns a picture of the divergence and of the tokens, attention by attention."""
        from irpe.viz.conversions import plot_conversion

        return plot_conversion(
            [each.divergence_before for each in self.attentions],
            [each.divergence_after for each in self.attentions],
            [each.tokens.r2 for each in self.attentions],
        )
