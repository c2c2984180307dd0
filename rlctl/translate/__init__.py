"""Translate files of TRL, verl and prime-rl into specs: `rlctl init --from`."""
