// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/chart"
	"github.com/xspin/xspin/eval/report"
)

func newCompareCmd() *cobra.Command {
	var (
		asJSON  bool
		picture string
	)
	cmd := &cobra.Command{
		Use:   "compare BEFORE.json AFTER.json",
		Short: "What has got better or worse between two runs of a benchmark, beyond the noise",
		Long: `The files are what xspin bench X --json printed, or the results.json of bench all, on
one machine: with two releases, two configurations, two kernels. Each row and each
point of a plot that both have is compared with itself.
It is better or worse if the 95 % interval of the change, by a bootstrap over the
runs of both, does not contain 0; else it is within noise. Needs no root.`,
		Example: `  sudo xspin bench rx --json > before.json
  sudo xspin bench rx --json > after.json
  xspin bench compare before.json after.json --plot changes.svg
  xspin bench compare old/results.json new/results.json`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			defer func() {
				if err != nil {
					err = fmt.Errorf("bench compare: %w", err)
				}
			}()
			format := ""
			if picture != "" {
				if format, err = chart.Format(picture); err != nil {
					return fmt.Errorf("--plot: %w", err)
				}
			}
			before, err := readDocument(args[0])
			if err != nil {
				return err
			}
			after, err := readDocument(args[1])
			if err != nil {
				return err
			}
			c := bench.Compare(args[0], before, args[1], after)
			if picture != "" {
				if err := writePlot(picture, format, c); err != nil {
					return fmt.Errorf("--plot: %w", err)
				}
			}
			if asJSON {
				return c.WriteJSON(cmd.OutOrStdout())
			}
			return c.WriteText(cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.Flags().StringVar(&picture, "plot", "", "draw the changes into a file, .svg or .png")
	return cmd
}

// readDocument reads what a bench has printed, or the report of all.
func readDocument(name string) (d *bench.Document, err error) {
	defer func() {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%s: %w", name, err)
		}
	}()
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b, err := io.ReadAll(io.LimitReader(f, report.Most+1))
	if err != nil {
		return nil, err
	}
	var all struct{ Experiments []json.RawMessage }
	if json.Unmarshal(b, &all) != nil || all.Experiments == nil {
		return bench.ReadDocument(bytes.NewReader(b))
	}
	r, err := report.Read(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	d = r.Document()
	return d, d.Check()
}

// writePlot draws before it opens the file: what is there stays if nothing can be drawn.
func writePlot(name, format string, c *bench.Comparison) error {
	p, err := chart.Changes(c)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := p.Write(&b, format); err != nil {
		return err
	}
	return os.WriteFile(name, b.Bytes(), 0o666)
}
