"""The table of laws. A law is a function of a trial: it compares outputs, expects a refusal, or does not apply."""

from collections.abc import Callable
from dataclasses import dataclass

from regard.verification.laws import backends, batch, caches, engine, memory, weights
from regard.verification.outcome import Outcome, not_applicable
from regard.verification.trial import Need, Trial


@dataclass(frozen=True)
class Law:
    needs: Need  # the law does not apply to a trial that lacks this feature
    check: Callable[[Trial], Outcome]

    def attempt(self, trial: Trial) -> Outcome:
        reason = trial.lacks.get(self.needs)
        return self.check(trial) if reason is None else not_applicable(reason)


LAWS = {
    "cached = whole": Law("memory", memory.cached),
    "chunked = whole": Law("memory", memory.chunked),
    "recurrent = parallel": Law("memory", memory.recurrent),
    "batched = alone": Law("inputs", batch.batched),
    "ragged decode = alone": Law("memory", batch.ragged),
    "uneven chunks = whole": Law("memory", batch.uneven),
    "padded left = right = alone": Law("padding", batch.padded),
    "packed = separate": Law("packing", batch.packed),
    "packed is refused by a store": Law("memory", batch.packed_memory),
    "paged = contiguous": Law("memory", memory.paged),
    "used row = fresh row": Law("memory", memory.used_row),
    "ring = all tokens": Law("memory", memory.rings),
    "quantized cache within its bound": Law("memory", caches.quantized),
    "evicting cache = dense mask": Law("memory", caches.evicting),
    "rewound = recomputed": Law("memory", memory.rewound),
    "forked = recomputed": Law("memory", memory.forked),
    "greedy engine = greedy forward": Law("engine", engine.greedy),
    "preempted = undisturbed": Law("engine", engine.preempted),
    "prefix hit = miss": Law("engine", engine.prefixes),
    "speculative = plain": Law("engine", engine.speculative),
    "saved and loaded = original": Law("weights", weights.saved),
    "exported and imported = original": Law("weights", weights.exported),
    "LoRA merged = unmerged": Law("inputs", weights.merged),
    "backends agree": Law("inputs", backends.backends),
}
