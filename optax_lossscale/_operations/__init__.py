"""Run a program operation by operation, beside a copy of it in float32."""
