//! Texts that come from a guest and go to somebody's terminal.

/// One line: what could change more than its own place on a screen is a question mark.
pub fn line(text: &str) -> String {
    text.chars()
        .map(|c| if is_harmless(c) { c } else { '?' })
        .collect()
}

/// Several lines, which may have tabs; a carriage return before a line's end goes with it.
pub fn lines(text: &str) -> String {
    let text = text.replace("\r\n", "\n");
    let keep = |c: char| c == '\n' || c == '\t' || is_harmless(c);
    text.chars()
        .map(|c| if keep(c) { c } else { '?' })
        .collect()
}

/// Control characters move the cursor and more; those of Unicode's general category Cf, and its line
/// and paragraph separators, change the order in which other characters are shown.
fn is_harmless(c: char) -> bool {
    let format = matches!(
        c,
        '\u{ad}'
            | '\u{600}'..='\u{605}'
            | '\u{61c}'
            | '\u{6dd}'
            | '\u{70f}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    );
    !c.is_control() && !format
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_only_what_stays_in_its_place_is_shown() {
        assert_eq!(
            line("sh -c 'echo é 漢' \x1b[31m\u{9b}2J\t\n"),
            "sh -c 'echo é 漢' ?[31m?2J??"
        );
        assert_eq!(line("a\u{202e}b\u{feff}"), "a?b?");
        assert_eq!(lines("a\tb\r\nc\rd\x1b[2J\n"), "a\tb\nc?d?[2J\n");
    }
}
