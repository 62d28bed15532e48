"""Weights that are used past their layer, and choices: seen in one forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tiny_models as tiny
from families.configs import build
from ostinato.runtime.bare_weights import BareWeight
from ostinato.runtime.linear import PackedLinear, make_invariant
from ostinato.runtime.observed import SharedLinear, keep_reached, observe


class Router(nn.Module):
    """Reaches for its layer's weight, as some routers do, and asks another layer for its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(64, 8, bias=False)
        self.up = nn.Linear(64, 64)

    def forward(self, rows: Tensor) -> Tensor:
        scores = nn.functional.linear(rows, self.classifier.weight.type(torch.float32))
        return self.up(rows.to(self.up.weight.dtype)) * scores.topk(2).values.sum(-1, keepdim=True)


def test_a_weight_that_others_use_stays() -> None:
    model, rows = Router().requires_grad_(False), torch.randn(300, 64)
    seen = observe(model, lambda: model(rows))
    assert seen.reached == ("classifier",)
    assert seen.chooses
    expected = model(rows)
    keep_reached(model, seen)
    make_invariant(model, None)
    assert type(model.classifier) is SharedLinear
    assert isinstance(model.classifier.weight, BareWeight)
    assert isinstance(model.up, PackedLinear)
    torch.testing.assert_close(model(rows), expected)
    whole = nn.functional.linear(rows, model.classifier.weight)
    assert torch.equal(nn.functional.linear(rows[:3], model.classifier.weight), whole[:3])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "reached", "chooses"),
    [("llama", 0, False), ("gemma3", 0, False), ("mamba2", 0, False), ("longcat_flash", 2, True), ("mixtral", 0, True)],
)
def test_families(name: str, reached: int, chooses: bool) -> None:
    """A tied embedding, or a layer that is asked for its dtype, is no use of a weight."""
    model = build(name)
    seen = observe(model, lambda: model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False))
    assert (len(seen.reached), seen.chooses) == (reached, chooses)


def test_to_ask_for_a_tied_weights_dtype_does_not_reach_it() -> None:
    """``model.dtype`` looks at the first parameter, which is the embedding's, and often the head's as well."""
    model = tiny.gemma3()
    assert model.lm_head.weight is model.get_input_embeddings().weight

    def run() -> None:
        assert model.dtype.is_floating_point
        model(input_ids=torch.tensor([[3, 4]]))

    assert observe(model, run).reached == ()
