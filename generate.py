"""Let a trained model write: `python generate.py --help` lists what can be chosen."""

from attnzoo.commands.generate import main

if __name__ == "__main__":
    main()
