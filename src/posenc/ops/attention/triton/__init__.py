"""One flash attention: `forward` and `backward` walk over tiles of scores, and a bias is a plug-in.

`parts` is what the walks share, with the hooks of a bias. Each kind of bias is a file: its hooks,
what is launched before the walks, and what makes its gradient. `walks` launches them, and `plans`
says which of them a call takes.
"""
