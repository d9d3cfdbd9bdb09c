#!/usr/bin/env python3
"""Train a model on files of training data, and validate it on separate files.

On one GPU, or on a CPU:

    python train_mixer.py --train-data a.csv b.csv --val-data v.csv --save-dir ./output --formatter hisco

On four GPUs or four CPU processes, and on two machines, where the second one has --node_rank=1:

    torchrun --nproc_per_node=4 train_mixer.py --distributed --train-data a.csv --val-data v.csv \\
        --save-dir ./output --batch-size 512
    torchrun --nnodes=2 --node_rank=0 --master_addr=HOST --master_port=29500 --nproc_per_node=4 \\
        train_mixer.py --distributed --train-data a.csv --val-data v.csv --save-dir ./output

The same command, given again, continues where the run in the save folder stopped. The run itself is
histocc/job/train.py for both scripts. The table in finetune.py lists the other places.
"""

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # before torch is imported, which takes seconds

from histocc.job import config, inputs, train
from histocc.runtime.frame import start


def get_args_parser():
    return config.train_mixer_parser()


def run(args, world):
    """Prepare the data, then do the run. All ranks."""
    args, read = inputs.prepare_data(
        args, world, args.train_data, args.val_data, "hisco", args.target_col_naming
    )
    train.run_training(args, read, world)


def main(argv=None):
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
