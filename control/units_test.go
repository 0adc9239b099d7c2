// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/json"
	"testing"
	"time"
)

func TestSizes(t *testing.T) {
	for _, tc := range []struct {
		json string
		want Size
		back string // defaults to json
		err  string
	}{
		{json: `0`, want: 0},
		{json: `1000`, want: 1000},
		{json: `"1000"`, want: 1000, back: `1000`},
		{json: `"64MiB"`, want: 64 << 20},
		{json: `"64 MiB"`, want: 64 << 20, back: `"64MiB"`},
		{json: `"1024KiB"`, want: 1 << 20, back: `"1MiB"`},
		{json: `"7EiB"`, want: 7 << 60},
		{json: `1025`, want: 1025},
		{json: `"8EiB"`, err: `size "8EiB" is larger than 8 EiB`},
		{json: `"64MB"`, err: `size "64MB": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`},
		{json: `"1.5GiB"`, err: `size "1.5GiB": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`},
		{json: `-1`, err: `size "-1": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`},
		{json: `1e3`, err: `size "1e3": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`},
		{json: `""`, err: `size "": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`},
		{json: `true`, err: `size "true": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`},
	} {
		var s Size
		err := json.Unmarshal([]byte(tc.json), &s)
		check(t, tc.json, s, tc.want, tc.back, err, tc.err)
	}
}

func TestDurations(t *testing.T) {
	for _, tc := range []struct {
		json string
		want Duration
		back string
		err  string
	}{
		{json: `"10s"`, want: Duration(10 * time.Second)},
		{json: `"90s"`, want: Duration(90 * time.Second), back: `"1m30s"`},
		{json: `"0s"`, want: 0},
		{json: `10`, err: `duration 10: want a number with a unit, in quotes, such as "10s"`},
		{json: `"10"`, err: `duration "10": want a number with a unit, such as "10s", "1.5s", "200ms" or "1m30s"`},
		{json: `"-1s"`, err: `duration "-1s": want a number with a unit, such as "10s", "1.5s", "200ms" or "1m30s"`},
	} {
		var d Duration
		err := json.Unmarshal([]byte(tc.json), &d)
		check(t, tc.json, d, tc.want, tc.back, err, tc.err)
	}
}

// check compares what JSON was read as, and how it is written again.
func check[T comparable](t *testing.T, in string, got, want T, back string, err error, wantErr string) {
	t.Helper()
	if err != nil || wantErr != "" {
		if err == nil || err.Error() != wantErr {
			t.Errorf("%s: error %v, want %s", in, err, wantErr)
		}
		return
	}
	if got != want {
		t.Errorf("%s is %v, want %v", in, got, want)
	}
	if back == "" {
		back = in
	}
	if b, err := json.Marshal(got); err != nil || string(b) != back {
		t.Errorf("%s is written as %s, error %v, want %s", in, b, err, back)
	}
}
