"""Text encoders with their heads."""

from typing import Any

from tests.families.cases import LARGE_INIT, VOCAB, Cases

BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 3,
    **LARGE_INIT,
}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 56,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 3,
    **LARGE_INIT,
}
ELECTRA = BERT | {"embedding_size": 20}
MODERNBERT = BERT | {
    "num_hidden_layers": 4,
    "cls_token_id": None,
    "sep_token_id": None,
    "local_attention": 8,
    "initializer_range": 0.3,
}
ODD = {"num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 33, "hidden_act": "relu", "num_labels": 2}
UNTIED = {"tie_word_embeddings": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "num_attention_heads": 1}


def make_cases(name: str, base: dict[str, Any], heads: str, *changes: dict[str, Any]) -> Cases:
    """Every class with the base settings, and with each of the changes to them."""
    return {
        f"{name}{head}, {n}": (f"{name}{head}", base | change)
        for head in heads.split()
        for n, change in enumerate(({}, *changes))
    }


CASES: Cases = {
    **make_cases("Bert", BERT, "Model", ODD, {"type_vocab_size": 1}),
    **make_cases(
        "Bert",
        BERT,
        "ForMaskedLM ForPreTraining ForSequenceClassification ForTokenClassification",
        ODD,
        UNTIED,
        {"type_vocab_size": 5, "max_position_embeddings": 33, "num_labels": 1},
    ),
    **make_cases(
        "Roberta",
        BERT | {"pad_token_id": 1},
        "Model ForMaskedLM ForSequenceClassification ForTokenClassification",
        ODD | {"pad_token_id": 0},
        UNTIED | {"pad_token_id": 2, "type_vocab_size": 1},
    ),
    **make_cases(
        "DistilBert",
        DISTILBERT,
        "Model ForMaskedLM ForSequenceClassification ForTokenClassification",
        {"n_layers": 1, "n_heads": 3, "activation": "relu", "hidden_dim": 33},
        {"tie_word_embeddings": False, "n_heads": 1, "sinusoidal_pos_embds": True, "num_labels": 2},
    ),
    **make_cases(
        "Electra",
        ELECTRA,
        "Model ForMaskedLM ForPreTraining ForSequenceClassification ForTokenClassification",
        ODD | {"embedding_size": 60},
        UNTIED | {"embedding_size": 48},
    ),
    **make_cases(
        "ModernBert",
        MODERNBERT,
        "Model ForMaskedLM ForSequenceClassification ForTokenClassification",
        {"num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 33, "classifier_pooling": "mean"},
        {"tie_word_embeddings": False, "decoder_bias": False, "attention_bias": True, "mlp_bias": True},
        {"norm_bias": True, "classifier_bias": True, "classifier_activation": "silu", "local_attention": 128},
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    **make_cases(
        "RoFormer",
        BERT,
        "Model ForMaskedLM ForSequenceClassification ForTokenClassification",
        ODD | {"embedding_size": 20},
        UNTIED | {"embedding_size": 60, "type_vocab_size": 1},
    ),
    **make_cases(
        "Longformer",
        BERT | {"pad_token_id": 1, "attention_window": 8},
        "Model ForMaskedLM ForSequenceClassification ForTokenClassification",
        ODD | {"attention_window": [4]},
        UNTIED | {"pad_token_id": 2, "type_vocab_size": 1, "attention_window": [4, 12]},
        {"attention_window": 64, "max_position_embeddings": 80},
    ),
    **make_cases(
        "BigBird",
        BERT | {"block_size": 2, "num_random_blocks": 1},
        "Model ForMaskedLM ForPreTraining ForSequenceClassification ForTokenClassification",
        ODD | {"attention_type": "original_full", "use_bias": False},
        UNTIED | {"block_size": 1, "num_random_blocks": 4, "rescale_embeddings": True},
        {"block_size": 16, "num_hidden_layers": 3},
    ),
}
