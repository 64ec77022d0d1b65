"""Evaluate checkpoints: `python eval.py ckpt_path=...`, `python eval.py runs=<folder of runs>`, `python eval.py --help`."""

from attnzoo.commands.eval import main

if __name__ == "__main__":
    main()
