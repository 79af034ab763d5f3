"""Learn: training loops for small language models and translators."""
