"""The kinds of specs: literal tables that map the `kind` of a file to the class that it selects.

There is one table per family of classes, so that `kind = "linear"` may name a learning-rate schedule in one place and
a scaling of RoPE in another. A base class names its table in `kind_table`. The tables are literal, so that the meaning
of a file depends neither on a registry nor on the order of imports.
"""

KINDS = {
    "decoder": "regard.models.decoder:Decoder",
    "encoder": "regard.models.encoder:Encoder",
    "encoder_decoder": "regard.models.encoder_decoder:EncoderDecoder",
    "seq2seq": "regard.models.seq2seq:Seq2Seq",
    "dual_encoder": "regard.models.dual_encoder:DualEncoder",
    "interleaved": "regard.models.interleaved:Interleaved",
    "projector": "regard.models.interleaved:Projector",
    "dense": "regard.models.heads:Dense",
    "masked_lm": "regard.models.heads:MaskedLM",
    "classification": "regard.models.heads:Classification",
    "pretraining": "regard.models.heads:PreTraining",
    "distilled": "regard.models.heads:Distilled",
    "pooled": "regard.models.heads:Pooled",
    "pooler": "regard.models.heads:Pooler",
    "probe": "regard.parts.pooling:AttentionPooling",
    "tokens": "regard.parts.input:Tokens",
    "patches": "regard.parts.patches:Patches",
    "frames": "regard.parts.frames:Frames",
    "repeat": "regard.models.stack:Repeat",
    "tiled": "regard.models.pattern:Tiled",
    "block": "regard.parts.block:Block",
    "sublayer": "regard.parts.block:Sublayer",
    "attention": "regard.parts.attention:Attention",
    "cross_attention": "regard.parts.cross_attention:CrossAttention",
    "big_bird_attention": "regard.parts.big_bird_attention:BigBirdAttention",
    "global_attention": "regard.parts.global_attention:GlobalAttention",
    "latent_attention": "regard.parts.latent_attention:LatentAttention",
    "native_sparse": "regard.parts.native_sparse_attention:NativeSparse",
    "scored_attention": "regard.parts.scored_attention:ScoredAttention",
    "linear_attention": "regard.parts.linear_attention:LinearAttention",
    "elu": "regard.parts.linear_attention:EluFeatures",
    "performer": "regard.parts.linear_attention:PerformerFeatures",
    "identity": "regard.parts.linear_attention:IdentityFeatures",
    "retention": "regard.parts.decayed_linear_attention:Retention",
    "gated_linear": "regard.parts.decayed_linear_attention:GatedLinear",
    "linformer": "regard.parts.linformer:Linformer",
    "time_mixing": "regard.parts.rwkv:TimeMixing",
    "channel_mixing": "regard.parts.rwkv:ChannelMixing",
    "rg_lru": "regard.parts.rg_lru:RGLRU",
    "shared_block": "regard.parts.shared_block:SharedBlock",
    "short_convolution": "regard.parts.short_convolution:ShortConvolution",
    "s4": "regard.parts.ssm.s4:S4",
    "s4d": "regard.parts.ssm.s4:S4D",
    "rnn": "regard.parts.recurrent:RNN",
    "lstm": "regard.parts.recurrent:LSTM",
    "gru": "regard.parts.recurrent:GRU",
    "bidirectional": "regard.parts.bidirectional:Bidirectional",
    "attentive_recurrence": "regard.parts.attention_rnn:AttentionRNN",
    "fixed_window": "regard.parts.window_mlp:WindowMLP",
    "mamba": "regard.parts.ssm.mamba:Mamba",
    "mamba2": "regard.parts.ssm.mamba2:Mamba2",
    "feedforward": "regard.parts.feedforward:FeedForward",
    "gated": "regard.parts.feedforward:Gated",
    "swiglu": "regard.parts.feedforward:SwiGLU",
    "experts": "regard.parts.experts:Experts",
    "router": "regard.parts.router:Router",
    "layernorm": "regard.parts.norm:LayerNorm",
    "rmsnorm": "regard.parts.norm:RMSNorm",
    "no_norm": "regard.parts.norm:NoNorm",
    "no_position": "regard.parts.position.base:NoPosition",
    "learned": "regard.parts.position.learned:Learned",
    "sinusoidal": "regard.parts.position.sinusoidal:Sinusoidal",
    "rope": "regard.parts.position.rope:Rope",
    "rope2d": "regard.parts.position.rope2d:Rope2D",
    "linear": "regard.parts.position.rope_scaling:LinearScaling",
    "ntk": "regard.parts.position.rope_scaling:NTK",
    "dynamic_ntk": "regard.parts.position.rope_scaling:DynamicNTK",
    "yarn": "regard.parts.position.rope_scaling:Yarn",
    "llama3": "regard.parts.position.rope_scaling:Llama3",
    "longrope": "regard.parts.position.rope_scaling:LongRope",
    "t5_buckets": "regard.parts.position.t5:T5Buckets",
    "alibi": "regard.parts.position.alibi:Alibi",
    "causal": "regard.kernels.attention.mask:Causal",
    "full": "regard.kernels.attention.mask:Full",
    "window": "regard.kernels.attention.patterns.window:Window",
    "dilated": "regard.kernels.attention.patterns.window:Dilated",
    "sinks_and_window": "regard.kernels.attention.patterns.window:SinksAndWindow",
    "strided": "regard.kernels.attention.patterns.sparse_transformer:StridedPattern",
    "fixed": "regard.kernels.attention.patterns.sparse_transformer:FixedPattern",
    "block_sparse": "regard.kernels.attention.patterns.block_pattern:BlockSparse",
    "longformer": "regard.kernels.attention.patterns.longformer:Longformer",
    "bigbird": "regard.kernels.attention.patterns.bigbird:BigBird",
    "prefix_lm": "regard.kernels.attention.mask:PrefixLM",
    "recipe": "regard.training.recipe:Recipe",
    "data": "regard.training.data_settings:Data",
    "vocabulary": "regard.training.data_settings:Vocabulary",
    "training": "regard.training.recipe:Training",
    "lora": "regard.adapt.lora:LoRA",
}


OBJECTIVES = {
    "next_token": "regard.objectives.next_token:NextToken",
    "translation": "regard.objectives.translation:Translation",
    "classification": "regard.objectives.classification:SequenceClassification",
}

SOURCES = {
    "world": "regard.data.sources.world:WorldStories",
    "pydoc": "regard.data.sources.files:Pydoc",
    "file": "regard.data.sources.files:File",
}

OPTIMIZERS = {
    "adamw": "regard.training.optimizer:AdamW",
}

SCHEDULES = {
    "constant": "regard.training.schedule:Constant",
    "cosine": "regard.training.schedule:Cosine",
    "wsd": "regard.training.schedule:WarmupStableDecay",
}

TABLES = {
    "parts": KINDS,
    "objectives": OBJECTIVES,
    "sources": SOURCES,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
}
