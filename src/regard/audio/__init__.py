"""Sound for models: files as samples, other sampling rates, and the log-mel spectrogram that Whisper reads."""
