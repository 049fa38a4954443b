//! The device against a guest that does as Linux does, or the worst it can.

mod close;
mod flow;
mod guest;
mod hostile;
mod lifecycle;
mod open;
