"""`--compile`: what the layers compute stays the same."""

import pytest
import torch

from histocc.formatter import hisco_blocky5
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.runtime import device


def gradients(model, widths) -> list[torch.Tensor]:
    """Of one pass over texts of each width, and the logits."""
    found = []
    for width in widths:
        generator = torch.Generator().manual_seed(width)
        ids = torch.randint(97, 122, (3, width), generator=generator)
        target = torch.randint(5, 17, (3, 11), generator=generator)
        mask = torch.ones(3, width, dtype=torch.bool)
        mask[1, width // 2 :] = False
        outputs = model(ids, mask, target)
        sum(output.square().sum() for output in outputs).backward()
        found += [output.detach() for output in outputs]
    return found + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.full
def test_layers_compute_the_same(monkeypatch):
    """Whatever the width; traced as a whole and run by torch's own kernels, since machine code takes a minute
    to make.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(
            Seq2SeqMixerOccCANINE(
                hisco_blocky5().num_classes,
                7,
                config=model_config("tiny", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
            )
            .double()
            .train()
        )
    plain, compiled = models
    layer_compile, seen = torch.nn.Module.compile, []
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **flags: (seen.append(module), layer_compile(module, backend="eager", **flags)),
    )
    device.compile_layers(compiled)
    # outer layers, stack, decoder
    assert len(seen) == 4 + 3 and list(compiled.state_dict()) == list(plain.state_dict())
    torch._dynamo.utils.counters.clear()
    for ours, theirs in zip(gradients(compiled, (16, 24, 40)), gradients(plain, (16, 24, 40)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # one for each kind of layer, not for each shape
    assert 3 <= graphs <= 4, dict(torch._dynamo.utils.counters)
