"""The training job of finetune.py and train_mixer.py, from their flags to the last checkpoint."""
