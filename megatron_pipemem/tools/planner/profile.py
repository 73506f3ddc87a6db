"""The profile of a model: the costs of its parts on one rank, from which stages are priced.

A stage has its layers and its *frame*: all parts that are not layers. The first stage's frame has the embedding, and
the last one's has final norm, head and loss. Seconds, bytes and parameters of a stage are sums over its layers and its
frame, so one profile gives the costs of every division into stages. Profiles come from formulas (``from_formulas``), or
from running stages of Megatron's modules (``megatron.profiling``).
"""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.files import read_json
from megatron_pipemem.model.activations import message_bytes
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.part_costs import Part, PartCosts, Passes, part_costs
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.tools.config.cluster import Cluster, Link
from megatron_pipemem.tools.config.loading import settings_of, typed
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner import prices
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown, Price
from megatron_pipemem.values import check_magnitudes

_PARTS = ("layers", "end_layers", "first", "middle", "last")

Source = Literal["formulas", "measured"]


@dataclass(frozen=True)
class Bandwidths:
    """Measured bandwidths between device and host, in 10^9 bytes per second."""

    d2h: float  # from device to host alone
    h2d: float  # from host to device alone
    both: float  # each way, if both run
    d2h_computing: float  # from device to host during matrix products
    h2d_computing: float  # from host to device during matrix products
    both_computing: float  # each way, if both run during matrix products


@dataclass(frozen=True)
class Profile:
    """The costs of the parts of one model, with one parallelism and one execution."""

    model: Model
    execution: Execution
    source: Source
    """The origin of seconds, bytes and parameters. Measured seconds are those of computing alone. Formulas add tensor-,
    context- and expert-parallel messages (``planner.prices``)."""
    device: str  # the measured device, or the speed in the formulas
    layers: dict[str, Part]  # one layer of every kind in the model
    first: Part  # the frame of the stage with the embedding
    middle: Part  # the frame of a middle stage
    last: Part  # the frame of the stage with the head, and with multi-token prediction
    message_bytes: float  # of one microbatch between two stages
    optimizer_seconds: float  # of one step, per parameter
    bandwidths: Bandwidths | None = None  # to the host, if measured
    launching: dict[str, float] | None = None
    """Seconds in which the host launches F, I and W of a layer, by kind, if measured on a GPU."""
    end_layers: dict[str, Part] | None = None
    """Layers of the first and the last stage, if they differ: there unfused attention takes its mask from the batch, and
    elsewhere every layer makes and keeps one."""

    @property
    def layer(self) -> Part:
        """The costs of the model's most frequent kind of layer."""
        return self.layers[self.model.main_kind]

    def costs(self, link: Link | None = None) -> PartCosts:
        """Return the costs of layers and frames, from which stages of any placement are priced.

        ``link`` connects neighbouring pipeline ranks. Without it, messages cost nothing.
        """
        return part_costs(self.to_json(link))

    def slowdown(self, cluster: Cluster) -> MeasuredSlowdown:
        """Return the ratios of measured seconds to those that ``planner.prices`` predicts for a device of this cluster.

        Raise a ConfigError if the profile's seconds were not measured.
        """
        if self.source != "measured":
            raise ConfigError(
                "wrong-file",
                f"has seconds from {self.source}, which were not measured; run `pipemem profile` on a device",
            )

        def longer(part: Part, price: Price) -> Passes:
            computing = price.seconds + price.communication_seconds * -1
            return prices.each_pass(operator.truediv, part.seconds, computing)

        return MeasuredSlowdown(
            layer=longer(self.layer, prices.layer(self.model, self.execution, cluster, self.model.main_kind)),
            head=longer(self.last, prices.last(self.model, self.execution, cluster)),
            # Recomputation launches more, and a run may recompute less than its profile.
            launching=tuple((self.launching or {}).items()) if self.execution.recompute == "none" else (),
        )

    def to_json(self, link: Link | None = None) -> dict[str, Any]:
        """Return the object for ``--pipemem-costs``: costs of parts and messages, and this profile's other fields.

        ``link`` connects neighbouring pipeline ranks. Without it, messages cost nothing.
        """
        whole = asdict(self) | {"model": settings_of(self.model)}
        parts = {name: whole.pop(name) for name in _PARTS}
        if self.end_layers is None:
            del parts["end_layers"]
        p2p = 0.0 if link is None else link.seconds(self.message_bytes)
        return {"parts": {"order": list(self.model.kinds), **parts}, "p2p": p2p, "profile": whole}

    @classmethod
    def from_json(cls, path: str | Path) -> Profile:
        """Read a profile from a file that ``pipemem profile --output`` wrote; raise a ConfigError if it is not one."""
        whole, parts = read_json(path, "a profile"), {}
        try:
            if not isinstance(whole, dict) or not isinstance(whole.get("profile"), dict):
                raise ConfigError("wrong-file", "it lacks an object under the key 'profile'")
            if not isinstance(whole.get("parts", {}), dict):
                raise ConfigError("wrong-file", "it lacks an object under the key 'parts'")
            parts = whole.get("parts", {})
            # Files of earlier versions have the parts under the key profile.
            fields = whole["profile"] | {key: value for key, value in parts.items() if key != "order"}
            check_magnitudes(fields)
            apart = ("layers_per_stage", "offload_ratio")
            profile = typed({key: value for key, value in fields.items() if key not in apart}, cls)
            if missing := set(profile.model.kinds) - set(profile.layers):
                raise ConfigError(
                    "missing-option",
                    f"lacks the model's layers of kind {min(missing)!r}; profile the model again",
                    key="layers",
                )
            return profile
        except ConfigError as error:
            within = "parts" if (error.key or "").partition(".")[0] in parts else "profile"
            key_text = "" if error.key is None else f"{within}.{error.key}: "
            raise ConfigError(
                error.code, f"is not a profile of `pipemem profile`: {key_text}{error.message}", file=path
            ) from error


def from_formulas(model: Model, execution: Execution, cluster: Cluster) -> Profile:
    """Return the profile that ``planner.prices`` predicts, without running anything."""
    message = message_bytes(model, execution)
    # The ledger counts a layer's input as the message that brought it, also in the frame of the first stage. A stage
    # exchanges these messages with the stages before and after it. A result counts until it is sent.
    before = Part(memory={Kind.RECV_F: message, Kind.F: -message, Kind.I: message, Kind.SEND_I: -message})
    behind = Part(memory={Kind.F: message, Kind.SEND_F: -message, Kind.RECV_I: message, Kind.I: -message})
    batch = Part()
    if execution.cp > 1 and execution.attention == "unfused":  # the rank's rows of the mask that the batch brings
        mask_bytes = model.sequence**2 / execution.cp
        batch = Part(memory={Kind.F: mask_bytes, Kind.I: -mask_bytes})
    return Profile(
        model=model,
        execution=execution,
        source="formulas",
        device=speed(cluster),
        layers={kind: _priced(prices.layer(model, execution, cluster, kind)) for kind in dict.fromkeys(model.kinds)},
        first=_priced(prices.embedding(model, execution, cluster) + prices.tower_price(model, execution, cluster))
        + behind
        + batch,
        middle=before + behind,
        last=_priced(prices.last(model, execution, cluster)) + before + batch,
        message_bytes=message,
        optimizer_seconds=prices.adam_seconds(cluster),
    )


def speed(cluster: Cluster) -> str:
    """Return the speed of a device that the formulas assume, as text in TFLOP/s."""
    return f"{cluster.tflops:g} TFLOP/s peak, {cluster.achieved:.0%} of it achieved"


def _priced(price: Price) -> Part:
    kept = price.kept_bytes
    memory = {Kind.F: kept.saved, Kind.I: kept.after_input - kept.saved, Kind.W: -kept.after_input}
    return Part(price.seconds, memory, price.parameters)


def slowdown_of(path: Path, run: Run) -> MeasuredSlowdown:
    """Read a measured profile of the run's model, and return the ratios of its seconds to predicted seconds.

    Raise a ConfigError if the profile is of another model (``other-model``), or was not measured (``wrong-file``).
    """
    profile = Profile.from_json(path)
    if replace(profile.model, source=run.model.source) != run.model:
        raise ConfigError("other-model", "is of another model than the run's; profile the model of the run", file=path)
    try:
        return profile.slowdown(run.cluster)
    except ConfigError as error:
        raise ConfigError(error.code, error.message, file=path) from error
