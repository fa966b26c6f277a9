"""Speech to text with Whisper: its special tokens, its decoding rules, audio of any length, and subtitles."""
