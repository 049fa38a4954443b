//! The rules of a container's devices, as a program that the kernel asks (`BPF_PROG_TYPE_CGROUP_DEVICE`;
//! `Documentation/admin-guide/cgroup-v2.rst`, "Device controller").
//!
//! Of the rules the last one that fits decides, for each kind of access by itself; what no rule fits is
//! denied. After the spec's come those by which other runtimes let every container have its defaults.

use std::fs::File;
use std::io;
use std::path::Path;

use serde_json::Value;

use crate::status::Refusal;
use crate::sys;

/// Kinds of access (`linux/bpf.h`, `BPF_DEVCG_ACC_…`).
const MKNOD: u8 = 1;
const READ: u8 = 2;
const WRITE: u8 = 4;

/// Most rules; a program may have 4096 instructions where the kernel's limit is the oldest one.
const MOST_RULES: usize = 200;

/// Kind of a device (`BPF_DEVCG_DEV_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Block = 1,
    Character = 2,
}

/// One rule; `None` for any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    allow: bool,
    kind: Option<Kind>,
    major: Option<u32>,
    minor: Option<u32>,
    access: u8,
}

/// What every container may use: all nodes made, and the devices that are in every `/dev`.
const DEFAULTS: [Rule; 10] = [
    default(Kind::Character, None, None, MKNOD),
    default(Kind::Block, None, None, MKNOD),
    default(Kind::Character, Some(1), Some(3), ALL),
    default(Kind::Character, Some(1), Some(8), ALL),
    default(Kind::Character, Some(1), Some(7), ALL),
    default(Kind::Character, Some(5), Some(0), ALL),
    default(Kind::Character, Some(1), Some(5), ALL),
    default(Kind::Character, Some(1), Some(9), ALL),
    // Terminals and their multiplexer.
    default(Kind::Character, Some(136), None, ALL),
    default(Kind::Character, Some(5), Some(2), ALL),
];

const ALL: u8 = MKNOD | READ | WRITE;

const fn default(kind: Kind, major: Option<u32>, minor: Option<u32>, access: u8) -> Rule {
    Rule {
        allow: true,
        kind: Some(kind),
        major,
        minor,
        access,
    }
}

/// The rules of `LinuxResources` (JSON), whose field is called `field`. `None` when there are none.
fn parse(resources: &Value, field: &str) -> Result<Option<Vec<Rule>>, Refusal> {
    let Some(list) = resources.get("devices").and_then(Value::as_array) else {
        return Ok(None);
    };
    if list.len() > MOST_RULES {
        let text = format!(
            "{field}.devices: {} rules, of which {MOST_RULES} are possible",
            list.len()
        );
        return Err(Refusal::invalid(text));
    }
    let rules = list.iter().enumerate().map(|(index, rule)| {
        parse_rule(rule)
            .map_err(|what| Refusal::invalid(format!("{field}.devices[{index}].{what}")))
    });
    rules.collect::<Result<_, _>>().map(Some)
}

fn parse_rule(rule: &Value) -> Result<Rule, String> {
    let text = |name: &str| rule.get(name).and_then(Value::as_str).unwrap_or_default();
    let kind = match text("type") {
        "" | "a" => None,
        "b" => Some(Kind::Block),
        "c" | "u" => Some(Kind::Character),
        other => return Err(format!("type: {other:?} is no type of device")),
    };
    let number = |name: &str| match rule.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_i64() {
            Some(-1) => Ok(None),
            Some(number) => u32::try_from(number)
                .map(Some)
                .map_err(|_| format!("{name}: {number} is no number")),
            None => Err(format!("{name}: {value} is no number")),
        },
    };
    let mut access = 0;
    for letter in text("access").chars() {
        access |= match letter {
            'r' => READ,
            'w' => WRITE,
            'm' => MKNOD,
            _ => return Err(format!("access: {letter:?} is none of r, w and m")),
        };
    }
    Ok(Rule {
        allow: rule.get("allow").and_then(Value::as_bool).unwrap_or(false),
        kind,
        major: number("major")?,
        minor: number("minor")?,
        access,
    })
}

/// Rules that the kernel can be had to follow.
#[derive(Debug)]
pub struct Program(Vec<u64>);

impl Program {
    /// The rules of `LinuxResources` (JSON), whose field is called `field`; `None` when there are none.
    pub fn of_update(resources: &Value, field: &str) -> Result<Option<Self>, Refusal> {
        Ok(parse(resources, field)?.map(Self::new))
    }

    /// The same of a new container, which has the defaults where there are none.
    pub fn of_container(resources: &Value, field: &str) -> Result<Self, Refusal> {
        Ok(Self::new(parse(resources, field)?.unwrap_or_default()))
    }

    fn new(rules: Vec<Rule>) -> Self {
        let rules: Vec<Rule> = rules.into_iter().chain(DEFAULTS).collect();
        Self(program(&rules))
    }

    /// Has the kernel follow them in a cgroup.
    pub fn enforce(&self, cgroup: &Path, field: &str) -> Result<(), Refusal> {
        let attach = || {
            let program = sys::load_device_program(&self.0)?;
            sys::attach_device_program(File::open(cgroup)?, program)
        };
        attach().map_err(|error: io::Error| Refusal::failed(format!("{field}.devices: {error}")))
    }
}

/// Registers: what is asked for is read once into these.
const RESULT: u8 = 0;
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;
const SCRATCH: u8 = 6;

/// Operations of the machine (`linux/bpf_common.h`, `linux/bpf.h`).
const LOAD_WORD: u8 = 0x61;
const MOVE: u8 = 0xb7;
const MOVE_REGISTER: u8 = 0xbf;
const AND: u8 = 0x57;
const SHIFT_RIGHT: u8 = 0x77;
const JUMP_IF_NOT: u8 = 0x55;
const JUMP_IF_EQUAL: u8 = 0x15;
const EXIT: u8 = 0x95;

/// One instruction: operation, registers, offset and number (`struct bpf_insn`).
const fn instruction(operation: u8, to: u8, from: u8, offset: i16, number: i32) -> u64 {
    operation as u64
        | ((to | from << 4) as u64) << 8
        | (offset as u16 as u64) << 16
        | (number as u32 as u64) << 32
}

/// The program of rules. Kinds of access that a rule allows are taken out of those that are asked for,
/// beginning with the last rule; once none is left the answer is yes.
fn program(rules: &[Rule]) -> Vec<u64> {
    let mut code = vec![
        // struct bpf_cgroup_dev_ctx: access in the upper half of a word, kind in the lower.
        instruction(LOAD_WORD, KIND, CONTEXT, 0, 0),
        instruction(MOVE_REGISTER, ACCESS, KIND, 0, 0),
        instruction(SHIFT_RIGHT, ACCESS, 0, 0, 16),
        instruction(AND, KIND, 0, 0, 0xffff),
        instruction(LOAD_WORD, MAJOR, CONTEXT, 4, 0),
        instruction(LOAD_WORD, MINOR, CONTEXT, 8, 0),
    ];
    for rule in rules.iter().rev() {
        let mut block = Vec::new();
        if rule.allow {
            block.push(instruction(AND, ACCESS, 0, 0, !i32::from(rule.access)));
            block.push(instruction(JUMP_IF_NOT, ACCESS, 0, 2, 0));
            block.push(instruction(MOVE, RESULT, 0, 0, 1));
        } else {
            block.push(instruction(MOVE_REGISTER, SCRATCH, ACCESS, 0, 0));
            block.push(instruction(AND, SCRATCH, 0, 0, i32::from(rule.access)));
            block.push(instruction(JUMP_IF_EQUAL, SCRATCH, 0, 2, 0));
            block.push(instruction(MOVE, RESULT, 0, 0, 0));
        }
        block.push(instruction(EXIT, 0, 0, 0, 0));
        let tests = [
            (KIND, rule.kind.map(|kind| kind as i32)),
            (MAJOR, rule.major.map(|number| number as i32)),
            (MINOR, rule.minor.map(|number| number as i32)),
        ];
        let tests: Vec<(u8, i32)> = tests
            .into_iter()
            .filter_map(|(register, number)| Some((register, number?)))
            .collect();
        for (place, (register, number)) in tests.iter().enumerate() {
            let beyond = tests.len() - place - 1 + block.len();
            code.push(instruction(
                JUMP_IF_NOT,
                *register,
                0,
                beyond as i16,
                *number,
            ));
        }
        code.extend(block);
    }
    code.push(instruction(MOVE, RESULT, 0, 0, 0));
    code.push(instruction(EXIT, 0, 0, 0, 0));
    code
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Runs a program as the kernel would.
    fn run(code: &[u64], kind: Kind, major: u32, minor: u32, access: u8) -> bool {
        let context = [u32::from(access) << 16 | kind as u32, major, minor];
        let mut registers = [0_i64; 11];
        let mut at = 0;
        for _ in 0..code.len() {
            let word = code[at];
            let (to, from) = ((word >> 8 & 15) as usize, (word >> 12 & 15) as usize);
            let (offset, number) = ((word >> 16) as u16 as i16, (word >> 32) as u32 as i32);
            at += 1;
            let jump = match word as u8 {
                LOAD_WORD => {
                    registers[to] = i64::from(context[offset as usize / 4]);
                    false
                }
                MOVE => {
                    registers[to] = i64::from(number);
                    false
                }
                MOVE_REGISTER => {
                    registers[to] = registers[from];
                    false
                }
                AND => {
                    registers[to] &= i64::from(number);
                    false
                }
                SHIFT_RIGHT => {
                    registers[to] >>= number;
                    false
                }
                JUMP_IF_NOT => registers[to] != i64::from(number),
                JUMP_IF_EQUAL => registers[to] == i64::from(number),
                EXIT => return registers[usize::from(RESULT)] != 0,
                other => panic!("operation {other:#x}"),
            };
            if jump {
                at += offset as usize;
            }
        }
        panic!("it does not end");
    }

    fn code(rules: Value) -> Vec<u64> {
        let rules = parse(&json!({"devices": rules}), "r").unwrap().unwrap();
        program(&rules)
    }

    #[test]
    fn test_the_last_rule_that_fits_decides_for_each_kind_of_access() {
        let code = code(json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 1, "minor": 11, "access": "rw"},
            {"allow": true, "type": "c", "major": 10, "access": "r"},
            {"allow": false, "type": "c", "major": 1, "minor": 11, "access": "w"},
        ]));
        let ask = |kind, major, minor, access| run(&code, kind, major, minor, access);
        assert!(ask(Kind::Character, 1, 11, READ));
        assert!(!ask(Kind::Character, 1, 11, WRITE));
        assert!(!ask(Kind::Character, 1, 11, READ | WRITE));
        assert!(!ask(Kind::Block, 1, 11, READ));
        assert!(ask(Kind::Character, 10, 237, READ));
        assert!(!ask(Kind::Character, 10, 237, READ | MKNOD));
        assert!(!ask(Kind::Character, 1, 1, READ));
    }

    #[test]
    fn test_kinds_of_access_may_be_allowed_by_different_rules() {
        let code = code(json!([
            {"allow": true, "type": "b", "access": "r"},
            {"allow": true, "type": "b", "major": 7, "access": "wm"},
        ]));
        assert!(run(&code, Kind::Block, 7, 1, READ | WRITE));
        assert!(!run(&code, Kind::Block, 8, 1, READ | WRITE));
    }

    #[test]
    fn test_defaults() {
        let code = program(&DEFAULTS);
        assert!(run(&code, Kind::Character, 1, 3, READ | WRITE));
        assert!(run(&code, Kind::Character, 136, 7, READ | WRITE));
        assert!(run(&code, Kind::Block, 8, 0, MKNOD));
        assert!(!run(&code, Kind::Block, 8, 0, MKNOD | READ));
        assert!(!run(&code, Kind::Character, 1, 1, READ));
    }

    #[test]
    fn test_odd_rules_are_named() {
        for (rule, text) in [
            (json!({"type": "x"}), "r.devices[0].type"),
            (json!({"major": -2}), "r.devices[0].major"),
            (json!({"minor": "1"}), "r.devices[0].minor"),
            (json!({"access": "rx"}), "r.devices[0].access"),
        ] {
            let refusal = parse(&json!({"devices": [rule]}), "r").unwrap_err();
            assert!(refusal.message.starts_with(text), "{}", refusal.message);
        }
    }

    #[test]
    fn test_an_update_without_rules_leaves_them() {
        let update = Program::of_update(&json!({"pids": {"limit": 1}}), "r").unwrap();
        assert!(update.is_none());
        assert_eq!(parse(&json!({"devices": null}), "r"), Ok(None));
    }
}
