"""Tasks: lm-eval's questions with right answers, asked of a model through any KV setting."""
