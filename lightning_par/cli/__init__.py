"""The command line: one Hydra config, composed once, trained by as many ranks as it asks for."""
