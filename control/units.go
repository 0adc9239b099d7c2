// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration that JSON and YAML write as "10s".
type Duration time.Duration

func (d Duration) String() string { return time.Duration(d).String() }

// MarshalText writes what String does.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads what time.ParseDuration does, but nothing negative.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil || v < 0 {
		return fmt.Errorf(`duration %q: want a number with a unit, such as "10s", "1.5s", "200ms" or "1m30s"`, text)
	}
	*d = Duration(v)
	return nil
}

// UnmarshalJSON reads a string as UnmarshalText does. A number is an error, because it
// has no unit.
func (d *Duration) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		return nil
	}
	s, isString, err := scalar(b)
	if err != nil {
		return err
	}
	if !isString {
		return fmt.Errorf(`duration %s: want a number with a unit, in quotes, such as "10s"`, s)
	}
	return d.UnmarshalText([]byte(s))
}

// Size is a number of bytes that JSON and YAML write as "64MiB", or as a number.
type Size int64

var units = []string{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}

// String returns the size in the largest unit that makes it a whole number.
func (s Size) String() string {
	n, unit := int64(s), ""
	for _, u := range units {
		if n == 0 || n%1024 != 0 {
			break
		}
		n, unit = n/1024, u
	}
	return strconv.FormatInt(n, 10) + unit
}

// MarshalText writes what String does.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalJSON writes a string such as "64MiB", or a number if no unit fits.
func (s Size) MarshalJSON() ([]byte, error) {
	text := s.String()
	if text == strconv.FormatInt(int64(s), 10) {
		return []byte(text), nil
	}
	return json.Marshal(text)
}

// UnmarshalText reads a whole number of bytes, KiB, MiB, GiB and so on.
func (s *Size) UnmarshalText(text []byte) error {
	digits, unit := string(text), int64(1)
	for i, u := range units {
		if rest, ok := strings.CutSuffix(digits, u); ok {
			digits, unit = strings.TrimSuffix(rest, " "), 1<<(10*(i+1))
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 63) // no sign
	if err != nil {
		return fmt.Errorf(`size %q: want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`, text)
	}
	if int64(n) > math.MaxInt64/unit {
		return fmt.Errorf("size %q is larger than 8 EiB", text)
	}
	*s = Size(int64(n) * unit)
	return nil
}

// UnmarshalJSON reads a number of bytes, or a string as UnmarshalText does.
func (s *Size) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		return nil
	}
	text, _, err := scalar(b)
	if err != nil {
		return err
	}
	return s.UnmarshalText([]byte(text))
}

// scalar returns the text of a JSON string, or any other value as it is.
func scalar(b []byte) (text string, isString bool, err error) {
	if len(b) == 0 || b[0] != '"' {
		return string(b), false, nil
	}
	err = json.Unmarshal(b, &text)
	return text, true, err
}
