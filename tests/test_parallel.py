"""How a model is spread over processes, as far as one process can show it."""

import torch
from torch import nn

from histocc.runtime import parallel
from histocc.runtime.world import World


def test_wrap_of_one_process():
    model = nn.Linear(2, 2)
    for mode in parallel.MODES:
        wrapped = parallel.wrap(model, World(), mode)
        assert wrapped is model is parallel.unwrap(wrapped)
    assert not parallel.is_wrapped(model) and not parallel.is_sharded(model)
    with parallel.no_sync(model, sync=False), parallel.whole_weights(model):
        pass


def test_what_nobody_shares_stays_as_it_is():
    state = {"a": [torch.ones(2), {"b": 3}], "step": 4}
    kept = parallel.whole(state)
    assert kept["a"][0] is state["a"][0] and kept["a"][1] == {"b": 3} and kept["step"] == 4
    assert parallel.whole(state, keep=False) == {"a": [None, {"b": 3}], "step": 4}


def test_optimizer_state_of_one_process_loads_as_ever():
    def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    (model, optimizer), (_, resumed) = trained(), trained()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    parallel.load_optimizer_state(resumed, optimizer.state_dict())
    assert all(
        torch.equal(a["exp_avg"], b["exp_avg"])
        for a, b in zip(optimizer.state.values(), resumed.state.values())
    )


def test_one_process_waits_for_nobody():
    waiting = parallel.StragglerTimer(nn.Linear(2, 2), torch.device("cpu"))
    waiting.backward_done()
    waiting.close()
    assert not waiting.measures and waiting.seconds == 0.0
