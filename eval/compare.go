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
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/chart"
	"github.com/xspin/xspin/eval/report"
)

func newCompareCmd() *cobra.Command {
	var (
		asJSON, all bool
		picture     string
	)
	cmd := &cobra.Command{
		Use:   "compare BEFORE AFTER",
		Short: "What has got better or worse between two runs of a benchmark, beyond the noise",
		Long: fmt.Sprintf(`BEFORE and AFTER are files that xspin bench X --json printed, or the results.json of
bench all, or its directory, on one machine: with two releases, two configurations,
two kernels. Each row and each point of a plot that both have is compared with itself.
It is better or worse if the 95 %% interval of the change, by a bootstrap over the
runs of both, does not contain 0; else it is within noise. A verdict takes %d runs or
more on both sides: a full run has them for most rows, and a quick one for few.
The runs of a document are of one process, so what differs from one process to the next
is in no interval. To see how much that is, compare two runs of the same release.

Rows that are worse or better are listed, the largest change first; --all lists
the others, too, and --json has all. Needs no root.`, bench.LeastRuns),
		Example: `  sudo xspin bench rx --json > before.json
  sudo xspin bench rx --json > after.json
  xspin bench compare before.json after.json --plot changes.svg
  xspin bench compare old-report new-report`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return fmt.Errorf("bench compare: want two results, and have %d: xspin bench compare BEFORE AFTER", len(args))
			}
			return nil
		},
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
			return c.WriteText(cmd.OutOrStdout(), all)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "list all rows, those that have not changed too")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document, with all rows")
	cmd.Flags().StringVar(&picture, "plot", "", "draw the largest changes into a file, .svg or .png")
	return cmd
}

// readDocument reads what a bench has printed, or the report of all, or that of a directory.
func readDocument(name string) (d *bench.Document, err error) {
	if fi, err := os.Stat(name); err == nil && fi.IsDir() {
		name = filepath.Join(name, report.File)
	}
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
