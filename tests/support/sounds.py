"""Real processors of transformers for sounds that need no download, and sounds for them."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.pictures import chat_template, tokenizer_of

FAMILIES = ("qwen2_audio", "qwen2_5_omni", "gemma3n", "gemma4")
OMNI_S = 60
"""Seconds to which features of Omni are padded here: the 300 of its files take half a second for each sound."""

_CLASSES = {"qwen2_audio": "Qwen2AudioProcessor", "qwen2_5_omni": "Qwen2_5OmniProcessor"}
_CLASSES |= {"gemma3n": "Gemma3nProcessor", "gemma4": "Gemma4Processor"}
_QWEN = {"audio": "<|AUDIO|>", "audio_bos": "<|audio_bos|>", "audio_eos": "<|audio_eos|>"}
_OMNI = _QWEN | {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "vision_bos": "<|vision_bos|>"}
_OMNI |= {"vision_eos": "<|vision_eos|>"}
_GEMMA = {"audio": "<audio_soft_token>", "boa": "<start_of_audio>", "eoa": "<end_of_audio>"}
_GEMMA |= {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
_MARKS = {"qwen2_audio": _QWEN, "qwen2_5_omni": _OMNI, "gemma3n": _GEMMA, "gemma4": _GEMMA}


@functools.cache
def sound_processor_of(family: str) -> Any:
    """The whole processor, made once in each process."""
    import transformers

    made = getattr(transformers, _CLASSES[family])
    tokenizer, mark = tokenizer_of(_MARKS[family]), _MARKS[family]["audio"]
    written = mark if family.startswith("gemma") else f"{_QWEN['audio_bos']}{mark}{_QWEN['audio_eos']}"
    tokenizer.chat_template = chat_template("audio", written)
    if family == "qwen2_audio":
        return made(feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128), tokenizer=tokenizer)

    class OnlyForSounds(made):  # the others need torchvision
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    if family == "gemma3n":
        extractor = transformers.Gemma3nAudioFeatureExtractor()
        return OnlyForSounds(feature_extractor=extractor, image_processor=None, tokenizer=tokenizer)

    if family == "gemma4":
        extractor = transformers.Gemma4AudioFeatureExtractor()
    else:
        extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=OMNI_S)
    return OnlyForSounds(feature_extractor=extractor, image_processor=None, video_processor=None, tokenizer=tokenizer)


def save_sound_processor(folder: Path, family: str) -> str:
    """A folder as a model has it: tokenizer, chat template and processor."""
    # A new one: a call of a processor leaves settings in its tokenizer, which would be saved.
    processor = sound_processor_of.__wrapped__(family)
    processor.tokenizer.save_pretrained(folder)
    extractor, own = json.loads(processor.feature_extractor.to_json_string()), {"processor_class": _CLASSES[family]}
    if family.startswith("gemma"):  # as their files are
        (folder / "processor_config.json").write_text(json.dumps(own | {"feature_extractor": extractor}))
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(own | extractor))
    return str(folder)


def write_sound(
    path: Path | str, seconds: float = 1.0, rate: int = 16_000, channels: int = 1, seed: int = 0, **settings: Any
) -> str:
    """A sound of noise, as the end of its name says."""
    import soundfile

    noise = np.random.default_rng(seed).standard_normal((round(seconds * rate), channels)).astype(np.float32) / 10
    with soundfile.SoundFile(path, "w", rate, channels, **settings) as file:
        for start in range(0, len(noise), rate):  # libsndfile ends the process if it is given minutes of Ogg at once
            file.write(noise[start : start + rate])
    return str(path)
