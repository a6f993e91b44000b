"""A Hugging Face Space on the tiny model inside the package: its demo, or teaching it by clicks.

The variable `G2RPO_PAGE` of the Space says which: `demo` (the default) or `teach`.
"""

import os
import sys

PAGES = {
    "demo": ["demo", "--model", "testbed"],
    "teach": ["teach", "words", "rewards.ocr="],  # without its reward that reads
}
PAGE = os.environ.get("G2RPO_PAGE") or "demo"
COMMAND = [sys.executable, "-m", "g2rpo", *PAGES.get(PAGE, ())]
# SPACE_HOST is set in a Space: the name by which its proxy is asked, from all addresses.
NAME = os.environ.get("SPACE_HOST")
COMMAND += ["--port", os.environ.get("GRADIO_SERVER_PORT", "7860")]
COMMAND += ["--host", "0.0.0.0", "--public-host", NAME] if NAME else []

if __name__ == "__main__":
    if PAGE not in PAGES:
        print(f"G2RPO_PAGE={PAGE!r}: should be {' or '.join(PAGES)}", file=sys.stderr)
        sys.exit(2)
    os.execv(sys.executable, COMMAND)
