//! `/init` of a guest whose operations with files are counted: see `thaw_tests::file_guest`.

fn main() {
    assert!(
        thaw_tests::file_guest::is_guest(),
        "this is a guest's first process, and nothing else"
    );
    thaw_tests::file_guest::serve()
}
