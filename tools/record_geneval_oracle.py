"""Record how upstream scores random detections, for tests/rewards/test_geneval.py (run by hand).

The whole of Flow-GRPO's reward server for GenEval (gen_eval.py) runs on detections, pictures and a
small CLIP from tests/rewards/geneval_cases.py, and GenEval's own evaluate_images.py beside it; only
the models and libraries that they load are replaced. Colours are named without autocast.

    git clone https://github.com/djghosh13/geneval; git clone
    https://github.com/yifan123/reward-server pip install --no-deps --target FOLDER
    clip-benchmark==1.6.2 python tools/record_geneval_oracle.py --geneval geneval/evaluation
    --server reward-server/reward_server --libraries FOLDER
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "rewards"))
from geneval_cases import CASES, CLASSES, case, read, see  # noqa: E402

found: tuple[Any, Any] = ([], None)  # what the detector answers next


class SmallCLIP:
    """Answers for open_clip's model, transform and tokenizer."""

    def encode_text(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack([read(texts[int(number)]) for number in numbers]))

    def encode_image(self, features: torch.Tensor) -> torch.Tensor:
        return features


texts: list[str] = []


def tokenize(given: list[str]) -> torch.Tensor:
    texts.extend(given)
    return torch.arange(len(texts) - len(given), len(texts))


def replace_libraries(folder: Path) -> None:
    """Empty modules in place of libraries; the real clip_benchmark, on the CPU and in float64."""
    sys.path.insert(0, str(folder))
    for name in ("mmdet", "mmdet.apis", "open_clip", "pandas", "sklearn", "sklearn.metrics"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["sklearn.metrics"].classification_report = sys.modules[
        "sklearn.metrics"
    ].balanced_accuracy_score = None
    sys.modules["mmdet"].__file__ = "."
    sys.modules["mmdet.apis"].init_detector = lambda *args, **options: None
    sys.modules["mmdet.apis"].inference_detector = lambda model, what: (
        [found] * len(what) if isinstance(what, list) else found
    )
    clip = sys.modules["open_clip"]
    transform = lambda picture: torch.from_numpy(see(picture))  # noqa: E731
    clip.create_model_and_transforms = lambda *args, **options: (SmallCLIP(), None, transform)
    clip.get_tokenizer = lambda name: tokenize
    torch.utils.data.DataLoader = functools.partial(torch.utils.data.DataLoader, num_workers=0)
    loader = torch.utils.data.DataLoader.func
    torch.utils.data.DataLoader = lambda data, batch_size, num_workers: loader(
        data, batch_size=batch_size
    )
    import clip_benchmark.metrics.zeroshot_classification as zsc

    for name in ("zero_shot_classifier", "run_classification"):
        setattr(zsc, name, functools.partial(getattr(zsc, name), amp=False))


def load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def geneval(folder: Path) -> Any:
    """GenEval's evaluate_images.py as a module with its command line's defaults."""
    torch.cuda.is_available = lambda: True  # it refuses to be read otherwise
    module = load(folder / "evaluate_images.py")
    torch.cuda.is_available = lambda: False
    module.args = argparse.Namespace(options={}, model_config="", model_path="")
    module.DEVICE = "cpu"
    module.object_detector, (module.clip_model, module.transform, module.tokenizer), _ = (
        module.load_models(module.args)
    )
    module.classnames = list(CLASSES)
    names = (
        "THRESHOLD",
        "COUNTING_THRESHOLD",
        "MAX_OBJECTS",
        "NMS_THRESHOLD",
        "POSITION_THRESHOLD",
    )
    # the defaults of its last lines
    for name, value in zip(names, (0.3, 0.9, 16, 1.0, 0.1), strict=True):
        setattr(module, name, value)
    return module


def server(folder: Path) -> Any:
    """The scoring function of Flow-GRPO's reward server."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "reward_server").mkdir()
        (Path(place) / "reward_server" / "object_names.txt").write_text("\n".join(CLASSES) + "\n")
        os.chdir(place)
        module = load(folder / "gen_eval.py")
        module.DEVICE = "cpu"
        return module.load_geneval()


def main() -> None:
    global found
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("geneval", "server", "libraries"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve(), required=True)
    arguments = parser.parse_args()
    replace_libraries(arguments.libraries)
    one, other = geneval(arguments.geneval), server(arguments.server)
    scores, correct = [], []
    with tempfile.TemporaryDirectory() as place:
        file = str(Path(place) / "picture.png")
        for seed in range(CASES):
            pixels, metadata, boxes, masks = case(seed)
            found = (
                [boxes[name] for name in CLASSES],
                masks and [list(masks[name]) for name in CLASSES],
            )
            Image.fromarray(pixels).save(file)
            score, right, strict, *_ = other([Image.fromarray(pixels)], [metadata])
            assert bool(right[0]) == one.evaluate_image(file, metadata)["correct"], seed
            assert (score[0] == 1) == bool(strict[0]), seed
            scores.append(score[0])
            correct.append(int(right[0]))
    path = ROOT / "tests" / "rewards" / "fixtures" / "geneval.json"
    path.write_text(
        json.dumps({"partial": scores, "correct": correct}, separators=(",", ":")) + "\n"
    )
    print(
        f"{path.relative_to(ROOT)}: {sum(correct)} of {CASES} correct, mean score {np.mean(scores):.3f}"
    )


if __name__ == "__main__":
    main()
