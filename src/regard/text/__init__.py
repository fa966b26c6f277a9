"""Text to ids and back: tokenizers, chat templates, text as it streams. Knows nothing of models."""
