"""A training run before it starts: memory per device, FLOPs, communication and time.

    memory    weights 4, gradients 4 and AdamW's moments 8 bytes per parameter, divided by shard · tensor; with bfloat16
              autocast 2 more for copies of the weights; with shard > 1 two gathered blocks (FSDP prefetches one);
              activations (activations.py) and logits of a micro-batch of rows / (data · shard · accumulate) rows
    compute   FLOPs of 3 forwards (flops.py), with checkpointing 4, / (devices · FLOP/s · utilization)
    update    28 bytes per parameter, read and written once by the optimizer / bandwidth
    exchange  data: an all-reduce of the gradients, 2 (d-1)/d · 4 bytes per parameter
              shard: two all-gathers of the weights and a reduce-scatter of the gradients per micro-batch
              tensor: an all-reduce of the residual stream per sublayer, in forward and backward
    step      max(compute, data and shard exchange, which overlap with it) + tensor exchange + update

Rajbhandari et al. 2020 (ZeRO); Shoeybi et al. 2019 (tensor parallelism); Korthikanti et al. 2022 (activations).
"""

from dataclasses import dataclass
from functools import cached_property

from regard.kernels.linear_cross_entropy import CHUNK
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.heads import MaskedLM, PreTraining
from regard.models.stack import unroll
from regard.parts.input import Tokens
from regard.planning.activations import activation_memory, block_parameters
from regard.planning.cost import Costs
from regard.planning.model_plan import plan
from regard.planning.parameters import stacks
from regard.planning.scaling import flops_6nd
from regard.planning.speed import Device

UTILIZATION = 0.4  # assumed share of the peak FLOP/s; a compiled model of 124M parameters reached 0.41 on an H200
USABLE = 0.9  # assumed share of a device's memory; the rest is for the allocator and the runtime
UPDATE_BYTES = 28  # float32: read weight, gradient and two moments, write weight and two moments
MAX_DEVICES = 4096
# Bytes per trained parameter of the optimizer's state. Others are planned as AdamW.
STATE_BYTES = {"adamw": 8.0, "muon": 4.0, "adafactor": 0.1, "adamw8bit": 2.1, "sgd": 4.0}


@dataclass(frozen=True)
class ParallelSplit:
    """Devices by their role: replicas, shards of the replicas (FSDP), and shares of every matrix (tensor)."""

    data: int = 1
    shard: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "shard", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"split: {name}={getattr(self, name)} must be at least 1")

    @property
    def devices(self) -> int:
        return self.data * self.shard * self.tensor

    def __str__(self) -> str:
        named = [f"{name}={n}" for name in ("data", "shard", "tensor") if (n := getattr(self, name)) > 1]
        return ", ".join(named) or "one device"


ONE_DEVICE = ParallelSplit()


@dataclass(frozen=True)
class TrainingJob:
    """A model and the settings on which the costs of training it depend."""

    spec: Model
    rows: int  # per step, on all devices
    length: int  # tokens per row
    steps: int
    accumulate: int = 1
    mixed: bool = False  # bfloat16 autocast
    optimizer: str = "adamw"
    trained: int | None = None  # parameters of adapters, if the model itself is frozen

    def __post_init__(self) -> None:
        for name in ("rows", "length", "steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @cached_property
    def costs(self) -> Costs:
        return plan(self.spec, context=self.length, batch=self.rows)

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.length

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def flops_per_token(self) -> int:
        """Frozen weights have no gradients, so their backward is one product of two."""
        return self.costs.training_flops if self.trained is None else self.costs.training_flops * 2 // 3

    @property
    def flops_per_step(self) -> int:
        return self.flops_per_token * self.tokens_per_step

    @property
    def flops(self) -> dict[str, float]:
        """FLOPs of the run: counted, the estimate 6·N·D, and the share of attention that it omits."""
        without_pairs = self.costs.flops(self.length, 0)
        pairs = 3 * (self.costs.flops(self.length, self.length) - without_pairs) / self.length
        return {
            "total": self.flops_per_token * self.tokens,
            "6ND": flops_6nd(self.costs.count.active, self.tokens),
            "of query-key pairs": pairs * self.tokens,
        }

    def micro_rows(self, split: ParallelSplit) -> int:
        """Rows of a micro-batch on one device."""
        return max(1, -(-self.rows // (split.data * split.shard * self.accumulate)))

    def memory(self, split: ParallelSplit = ONE_DEVICE, checkpointing: bool = False) -> dict[str, int]:
        """Bytes on one device by their use. A process and its libraries are not included."""
        parameters, rows = self.costs.parameters, self.micro_rows(split)
        local = -(-parameters // (split.shard * split.tensor))
        trained = local if self.trained is None else -(-self.trained // (split.shard * split.tensor))
        sizes = {
            "weights": 4 * (local if self.trained is None else local + trained),
            "gradients": 4 * trained,
            "optimizer": int(STATE_BYTES.get(self.optimizer, 8.0) * trained),
        }
        gathered = -(-max(size for size, _ in block_parameters(self.spec)) // split.tensor)
        if split.shard > 1:
            sizes["gathered blocks"] = 2 * gathered * (2 if self.mixed else 4)
        elif self.mixed:
            sizes["bfloat16 copies"] = 2 * local
        sizes["activations"] = activation_memory(self.spec, rows, self.length, self.mixed, checkpointing, split.tensor)
        return sizes | {"logits": logit_bytes(self.spec, rows * self.length, self.mixed) // split.tensor}

    def exchange(self, split: ParallelSplit) -> dict[str, float]:
        """Bytes that one device sends per step, by the role of the split."""
        trained = (self.trained or self.costs.parameters) / (split.shard * split.tensor)
        gathered = self.costs.parameters / split.tensor * (split.shard - 1) / split.shard
        numbers = sum(len(block.sublayers) * s.width for s in stacks(self.spec).values() for block in unroll(s.layers))
        stream = self.tokens_per_step / (split.data * split.shard) * numbers * (2 if self.mixed else 4)
        return {
            "data": 2 * 4 * trained * (split.data - 1) / split.data,
            "shard": gathered * ((4 if self.mixed else 8) + 4) * self.accumulate,
            "tensor": 2 * 2 * stream * (split.tensor - 1) / split.tensor,
        }

    def seconds_per_step(
        self,
        device: Device,
        split: ParallelSplit = ONE_DEVICE,
        utilization: float = UTILIZATION,
        checkpointing: bool = False,
    ) -> float:
        """The time of a step. The overhead of launching operations, which bounds small models, is not included."""
        forwards = 4 if checkpointing else 3
        compute = self.flops_per_step * forwards / 3 / (split.devices * device.flops * utilization)
        update = (
            UPDATE_BYTES * (self.trained or self.costs.parameters) / (split.shard * split.tensor) / device.bandwidth
        )
        seconds = {name: sent / device.link for name, sent in self.exchange(split).items()}
        return max(compute, seconds["data"] + seconds["shard"]) + seconds["tensor"] + update

    def fits(self, device: Device, split: ParallelSplit = ONE_DEVICE, checkpointing: bool = False) -> bool:
        return sum(self.memory(split, checkpointing).values()) <= USABLE * device.memory

    def smallest_split(self, device: Device, checkpointing: bool = False) -> ParallelSplit | None:
        """The fewest devices (a power of two, sharded, then also split by tensor) on which the run fits; None: none."""
        count = 1
        while count <= MAX_DEVICES:
            shard = min(count, 1 << (self.rows.bit_length() - 1))  # at most one row per shard
            split = ParallelSplit(shard=shard, tensor=count // shard)
            if split.tensor <= 8 and self.fits(device, split, checkpointing):
                return split
            count *= 2
        return None


def logit_bytes(spec: Model, tokens: int, mixed: bool) -> int:
    """Bytes of a language model's loss: logits and their gradient for one chunk of tokens, and that of the head."""
    decoder = next((stack for stack in stacks(spec).values() if isinstance(stack, Decoder)), None)
    if decoder is None:
        encoders = [stack for stack in stacks(spec).values() if isinstance(stack, Encoder)]
        inputs = [stack.input for stack in encoders if isinstance(stack.head, MaskedLM | PreTraining)]
        vocab = [input.vocab for input in inputs if isinstance(input, Tokens)]
        return 8 * tokens * sum(vocab)  # the logits of all tokens, and their gradient
    chunk = min(tokens, max(decoder.table_dim, CHUNK // decoder.vocab))
    return chunk * decoder.vocab * (2 if mixed else 8) + 4 * decoder.vocab * decoder.table_dim
