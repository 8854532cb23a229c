"""Chats for SFT, made as :mod:`tests.benchmarks.inputs` makes prompts."""

from tests.benchmarks.inputs import sft_chats as chats

__all__ = ("chats",)
