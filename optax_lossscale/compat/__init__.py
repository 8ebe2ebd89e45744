"""Other libraries' classes under their own names: change one import, and keep the rest.

The modules `flax`, `jmp` and `numpyro` have the public names of one library each.
Scripts and checkpoints that were written for it continue with the rules of this
package. A module is loaded when you import it, so the other library is needed only
where the module says so. `keras` holds `loss_scale_optimizer`, which has the signature
of Keras's class under a name of this package.
"""
