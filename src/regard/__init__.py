"""regard: one set of parts from which every transformer is built, trained, looked into, adapted and served.

The names below are imported on first use, so that `import regard` costs milliseconds and no torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "load": "regard.checkpoint.model_folder",
    "Decoder": "regard.models.decoder",
    "Block": "regard.parts.block",
    "Sublayer": "regard.parts.block",
    "Repeat": "regard.models.stack",
    "tile": "regard.models.pattern",
    "Encoder": "regard.models.encoder",
    "EncoderDecoder": "regard.models.encoder_decoder",
    "Seq2Seq": "regard.models.seq2seq",
    "DualEncoder": "regard.models.dual_encoder",
    "Interleaved": "regard.models.interleaved",
    "Attention": "regard.parts.attention",
    "CrossAttention": "regard.parts.cross_attention",
    "LatentAttention": "regard.parts.latent_attention",
    "NativeSparse": "regard.parts.native_sparse_attention",
    "use_backend": "regard.parts.attention",
    "LinearAttention": "regard.parts.linear_attention",
    "PerformerFeatures": "regard.parts.feature_maps",
    "Retention": "regard.parts.retention",
    "GatedLinear": "regard.parts.gated_linear",
    "Linformer": "regard.parts.linformer",
    "TimeMixing": "regard.parts.rwkv",
    "ChannelMixing": "regard.parts.rwkv",
    "RGLRU": "regard.parts.rg_lru",
    "SharedBlock": "regard.parts.shared_block",
    "ShortConvolution": "regard.parts.short_convolution",
    "RNN": "regard.parts.rnn",
    "LSTM": "regard.parts.lstm",
    "GRU": "regard.parts.gru",
    "WindowMLP": "regard.parts.window_mlp",
    "Mamba": "regard.parts.ssm.mamba",
    "Mamba2": "regard.parts.ssm.mamba2",
    "Rope": "regard.parts.position.rope",
    "Learned": "regard.parts.position.learned",
    "Sinusoidal": "regard.parts.position.sinusoidal",
    "Alibi": "regard.parts.position.alibi",
    "T5Buckets": "regard.parts.position.t5",
    "NoPosition": "regard.parts.position.base",
    "LayerNorm": "regard.parts.norm",
    "RMSNorm": "regard.parts.norm",
    "FeedForward": "regard.parts.feedforward",
    "SwiGLU": "regard.parts.feedforward",
    "Gated": "regard.parts.feedforward",
    "Experts": "regard.parts.experts",
    "Router": "regard.parts.router",
    "Window": "regard.kernels.attention.patterns.window",
    "Full": "regard.kernels.attention.mask",
    "Causal": "regard.kernels.attention.mask",
    "Engine": "regard.engine.engine",
    "Sampling": "regard.engine.request",
    "Tokenizer": "regard.text.tokenizer",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}; it offers {', '.join(_HOME)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
