"""Models that a user has changed train as under stock, or an error of this package refuses them."""

from __future__ import annotations

import pytest
import torch
from changed_models import CHANGES
from comparing import assert_predicted_bytes, bits
from lanes import nightly, rest_nightly
from model_flags import UNTIED, VOCABULARY
from quickstart import ROUNDING
from ranks import CaseFailed
from test_asynchronous import FLAGS

KINDS = {
    "zb-h1": ("zb-h1",),
    "v-half": ("v-half",),
    "zbv": ("zbv",),
    "1f1b": ("1f1b",),
    "cut vocabulary": ("zb-h1", VOCABULARY, "1"),
    "offload": ("v-half", "--pipemem-offload", "full", "--pipemem-offload-option", "min_bytes=1B"),
    "slices": ("seq1f1b",),
}
# Of a cut vocabulary, what its shards would lose; of slices, hooks that would see the gradient of a slice.
REFUSED = {
    "cut vocabulary": (
        *("computed embedding", "computed head", "hooked vocabulary", "scaled embeddings", "own loss"),
        "replaced head",
    ),
    "slices": (
        *("hooked", "hooked later", "hooked twice", "hook that counts", "hooked vocabulary", "hooked vocabulary later"),
        *("hooks before nodes", "hooks after nodes", "hooks after accumulation", "hook of several"),
        "used twice and hooked",
    ),
}
COVERING = {
    *(("scaled weights", "zb-h1"), ("merged adapters", "offload"), ("view of a larger weight", "v-half")),
    *(("hooked", "zbv"), ("hooked later", "v-half"), ("hooks after nodes", "zb-h1")),
    *(("used twice and hooked", "zb-h1"), ("adapters alone", "cut vocabulary"), ("hook that counts", "slices")),
    *(("hooked vocabulary later", "cut vocabulary"), ("hooked vocabulary", "cut vocabulary")),
}
CASES = [(changed, kind) for changed in CHANGES if changed for kind in KINDS]


@pytest.mark.parametrize(
    ("changed", "kind"), rest_nightly(CASES, COVERING, "the cases that stay: each way in which a change can be lost")
)
def test_trains_as_stock_or_is_refused(train_small, changed, kind):
    schedule, *flags = KINDS[kind]
    if changed in REFUSED.get(kind, ()):
        with pytest.raises(CaseFailed) as failure:
            train_small(schedule, UNTIED, *flags, changed=changed)
        assert "megatron_pipemem.errors.UnsupportedError" in str(failure.value)
        return
    stock = train_small("stock", UNTIED, changed=changed, gradients=True)
    run = train_small(schedule, UNTIED, *flags, changed=changed, gradients=True)
    assert run.losses == pytest.approx(stock.losses, rel=ROUNDING)
    assert run.gradients.keys() == stock.gradients.keys()
    for name, gradient in stock.gradients.items():
        torch.testing.assert_close(run.gradients[name], gradient, rtol=1e-4, atol=1e-7)
    assert all(map(int.__le__, run.counted_peaks, run.predicted_peaks))
    if (
        changed != "pruned"
    ):  # whose layers keep the weight of their last microbatch, so it is no activation and not counted
        assert_predicted_bytes(run, exact=False)


@nightly("test_asynchronous.py, and whole backwards above: these schedules split none")
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    "changed", ["merged adapters", "pruned", "hook that counts", "hooks after nodes", "frozen head"]
)
def test_trains_with_late_weights_as_the_formula_says(train_small, emulate, changed, name):
    run = train_small(name, *FLAGS[name], changed=changed)
    assert bits(run.losses) == bits(emulate(name, *FLAGS[name], changed=changed).losses)
