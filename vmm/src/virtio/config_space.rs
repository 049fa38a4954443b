//! Reading of a configuration space that is kept as bytes.

/// Copy what `config` has at `offset` to `data`; bytes past its end are zero.
pub fn read(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    if let Some(rest) = config.get(start..) {
        let len = rest.len().min(data.len());
        data[..len].copy_from_slice(&rest[..len]);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_past_the_end_are_zero() {
        let mut data = [9; 4];
        super::read(&[1, 2, 3], 1, &mut data);
        assert_eq!(data, [2, 3, 0, 0]);
        for offset in [3, 4, u64::MAX] {
            super::read(&[1, 2, 3], offset, &mut data);
            assert_eq!(data, [0; 4]);
        }
    }
}
