"""Train a model: `python train.py --help` lists what can be chosen."""

from attnzoo.commands.train import main

if __name__ == "__main__":
    main()
