"""Where metrics go. Only this package imports wandb."""
