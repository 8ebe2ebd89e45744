"""Other libraries' classes under their own names: change one import, and keep the rest.

Scripts and checkpoints that were written for Flax's `DynamicScale` continue with the
one of `flax`, which you import when you need it, because it needs Flax. `keras` holds
`loss_scale_optimizer`, which has the signature of Keras's class under a name of this
package.
"""
