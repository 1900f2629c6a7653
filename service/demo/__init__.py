"""The demo: a real trainer, real tensor-parallel workers, and an independent check of every byte."""
