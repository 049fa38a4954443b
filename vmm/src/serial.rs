//! A debug serial port (16550, transmit only), for a kernel that is told `console=ttyS0`: the one
//! console that works from its first line. Each character is an exit, so no template has it.

use std::io::{self, Write};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::layout::SERIAL_PORT;

/// Where the output of a guest's consoles goes. Called on whatever thread the output comes up.
pub type ConsoleOutput = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// Longest piece of output that waits for the end of its line.
const LINE: usize = 256;

/// The port's registers in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialRegisters {
    divisor: [u8; 2],
    interrupt: [u8; 2],
    line: [u8; 2],
    modem: [u8; 2],
    scratch: u8,
}

/// The port.
pub struct SerialPort {
    serial: Serial<Interrupt, NoEvents, Lines>,
}

impl SerialPort {
    /// A port that has just been switched on, raising `interrupt`.
    pub fn new(interrupt: EventFd, output: ConsoleOutput) -> Self {
        let lines = Lines {
            output,
            line: Vec::new(),
        };
        Self {
            serial: Serial::new(Interrupt(interrupt), lines),
        }
    }

    /// A port as it was in a snapshot.
    pub fn restore(
        registers: &SerialRegisters,
        interrupt: EventFd,
        output: ConsoleOutput,
    ) -> io::Result<Self> {
        let state = SerialState {
            baud_divisor_low: registers.divisor[0],
            baud_divisor_high: registers.divisor[1],
            interrupt_enable: registers.interrupt[0],
            interrupt_identification: registers.interrupt[1],
            line_control: registers.line[0],
            line_status: registers.line[1],
            modem_control: registers.modem[0],
            modem_status: registers.modem[1],
            scratch: registers.scratch,
            in_buffer: Vec::new(),
        };
        let lines = Lines {
            output,
            line: Vec::new(),
        };
        let serial = Serial::from_state(&state, Interrupt(interrupt), NoEvents, lines)
            .map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self { serial })
    }

    /// Give what is not yet a line to the output, because the rest will come from another machine.
    pub fn flush(&mut self) {
        self.serial.writer_mut().end_line();
    }

    /// What a snapshot keeps.
    pub fn registers(&self) -> SerialRegisters {
        let state = self.serial.state();
        SerialRegisters {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt: [state.interrupt_enable, state.interrupt_identification],
            line: [state.line_control, state.line_status],
            modem: [state.modem_control, state.modem_status],
            scratch: state.scratch,
        }
    }

    /// The guest reads one of the ports.
    pub fn read(&mut self, port: u16, data: &mut [u8]) {
        let register = port.wrapping_sub(SERIAL_PORT) as u8;
        data.fill_with(|| self.serial.read(register));
    }

    /// The guest writes one of the ports, several times for a string instruction.
    pub fn write(&mut self, port: u16, data: &[u8]) {
        let register = port.wrapping_sub(SERIAL_PORT) as u8;
        for byte in data {
            if let Err(error) = self.serial.write(register, *byte) {
                tracing::debug!("serial port: {error}");
            }
        }
    }
}

struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Collects characters into lines: fewer, larger pieces of output.
struct Lines {
    output: ConsoleOutput,
    line: Vec<u8>,
}

impl Lines {
    fn end_line(&mut self) {
        if !self.line.is_empty() {
            (self.output)(&self.line);
            self.line.clear();
        }
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            self.line.push(*byte);
            if *byte == b'\n' || self.line.len() >= LINE {
                self.end_line();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn test_output_comes_in_lines_and_registers_survive() {
        let text = Arc::new(Mutex::new(Vec::new()));
        let sink = text.clone();
        let output: ConsoleOutput = Arc::new(move |bytes: &[u8]| {
            sink.lock().unwrap().push(bytes.to_vec());
        });
        let event = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let mut port = SerialPort::new(event(), output.clone());
        port.write(SERIAL_PORT, b"one\ntwo");
        port.write(SERIAL_PORT + 7, &[0x5a]);
        assert_eq!(*text.lock().unwrap(), [b"one\n".to_vec()]);

        let mut restored = SerialPort::restore(&port.registers(), event(), output).unwrap();
        let mut scratch = [0];
        restored.read(SERIAL_PORT + 7, &mut scratch);
        assert_eq!(scratch, [0x5a]);
        assert_eq!(restored.registers(), port.registers());
    }
}
