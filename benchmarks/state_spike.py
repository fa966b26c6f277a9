"""Does one State interface serve eager, compiled and graph-captured decoding? Two mixers × two stores × three ways."""
import sys, time, torch
sys.path.insert(0, "src")
from regard.at import At
from regard.models.decoder import Decoder
from regard.models.stack import Repeat
from regard.parts.attention import Attention
from regard.parts.linear_attention import LinearAttention
from regard.parts.block import Block, Sublayer
from regard.parts.feedforward import SwiGLU
from regard.parts.position.rope import Rope
from regard.engine.stores.contiguous import Contiguous
from regard.engine.stores.paged import Paged

dev = "cuda" if torch.cuda.is_available() else "cpu"
big = dev == "cuda"
width, heads, kv, ffn, depth, vocab = (4096, 32, 8, 14336, 32, 128256) if big else (256, 8, 2, 512, 4, 512)
if big and len(sys.argv) > 1: depth = int(sys.argv[1])
MIX = {"attention": Attention(heads, kv, position=Rope()), "linear": LinearAttention(heads)}

def model_of(mix, dtype):
    spec = Decoder(vocab, width, (Repeat((Block((Sublayer(MIX[mix]), Sublayer(SwiGLU(ffn)))),), depth),))
    torch.manual_seed(0)
    with torch.device(dev):
        torch.set_default_dtype(dtype); m = spec.build(); torch.set_default_dtype(torch.float32)
    return m.eval().requires_grad_(False)

def store_of(kind, model, rows, cap, dtype):
    if kind == "contiguous": return Contiguous(model.spec.memory(), rows, cap, dtype, dev)
    s = Paged(model.spec.memory(), rows, cap, rows * cap // 16, dtype, dev)
    for r in range(rows): s.reserve(r, cap)
    return s

def stepper(model, store):
    def step(ids, pos):
        logits = model(ids, At(pos), store.states)[:, -1]
        ids.copy_(logits.argmax(-1, keepdim=True)); pos.add_(1)
        return logits
    return step

@torch.inference_mode(False)
@torch.no_grad()
def main():
    B, cap, P, N = (1, 1024, 64, 128) if big else (2, 256, 33, 32)
    dtype = torch.bfloat16 if big else torch.float64
    for mix in MIX:
        model = model_of(mix, dtype)
        prompt = torch.randint(vocab, (B, P), device=dev)
        weights = sum(p.numel() for p in model.parameters()) - (0)
        base = None
        for kind in ("contiguous", "paged"):
            for way in ("eager", "compiled") + (("graph",) if big else ()):
                store = store_of(kind, model, B, cap, dtype)
                logits = model(prompt, At(torch.arange(P, device=dev).expand(B, P)), store.states)[:, -1]
                ids, pos = logits.argmax(-1, keepdim=True), torch.full((B, 1), P, device=dev)
                step = stepper(model, store)
                if way != "eager":
                    torch._dynamo.reset()
                    step = torch.compile(step, fullgraph=True, mode="max-autotune-no-cudagraphs" if big else None)
                run = step
                start_ids, start_pos = ids.clone(), pos.clone()
                fixed = [x.array for b in store.states for x in b if hasattr(x, 'array')]; saved = [a.clone() for a in fixed]
                if way == "graph":
                    s = torch.cuda.Stream()
                    with torch.cuda.stream(s):
                        for _ in range(3): step(ids, pos)
                    torch.cuda.current_stream().wait_stream(s)
                    g = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(g): out = step(ids, pos)
                    run = lambda i, p: (g.replay(), out)[1]
                else:
                    for _ in range(2): step(ids, pos)
                ids.copy_(start_ids); pos.copy_(start_pos)
                for a, b in zip(fixed, saved): a.copy_(b)
                if big: torch.cuda.synchronize()
                t = time.time(); got = []; logs = []
                for _ in range(N):
                    o = run(ids, pos); got.append(ids.clone()); logs.append(o.clone() if not big else None)
                if big: torch.cuda.synchronize()
                dt = time.time() - t
                got = torch.cat(got, 1)
                if base is None: base = got
                whole = model(torch.cat([prompt, start_ids, got[:, :-1]], 1))
                err = (whole[:, P:] - torch.stack(logs, 1)).abs().max().item() if not big else float("nan")
                agree = (whole[:, P:].argmax(-1) == got).float().mean().item()
                print(f"{mix:10} {kind:11} {way:9} {N*B/dt:9.1f} tok/s  {weights*dtype.itemsize*N/dt/1e12:6.3f} TB/s  same as first: {bool((got == base).all())}  vs whole: {agree:.3f} err {err:.1e}", flush=True)
main()
